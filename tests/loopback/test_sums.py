"""Sums of buckets: each term where it belongs, and a number wherever there is none."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.check.parties import compressed
from piper.cost.presets import machine
from piper.ir.tensor_type import TensorType
from piper.plan.slots import Slot
from piper.plan.tasks import Add, Run
from piper.plan.types import Bucket
from piper.runtime.worker.adding import add_to_bucket
from piper.sim.task_costs import MachineCosts
from piper.strategies import parallel


@pytest.mark.parametrize("step", [4, 5, 8])  # how far apart parameters of 4 elements lie
@pytest.mark.parametrize("present", [range(12), range(0, 12, 2), [11], [0], []])
def test_what_no_term_covers_is_zero(
    step: int, present: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few gaps are cleared one by one, many at once; new memory has anything in it."""
    size, empty = 12 * step + 3, torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "zeros", None)
    type = TensorType((size,), "float32")
    bucket = Bucket(
        name="b0",
        params=tuple(map(str, range(12))),
        shapes=((2, 2),) * 12,
        offsets=tuple(range(0, 12 * step, step)),
        size=size,
        **dict.fromkeys(("dtype", "master", "sums", "wire", "state"), "float32"),
        slices=(),
    )
    terms = [torch.full((2, 2), float(i + 1)) for i in present]
    slots = [*terms, torch.full((size,), torch.nan)]
    task = Add(
        name="add",
        stream=0,
        terms=tuple(range(len(terms))),
        sums=(len(terms),),
        first=(True,) * len(terms),
        offsets=tuple(i * step for i in present),
        zeros=True,
    )
    slot = Slot(name="sum", kind="sum", type=type)
    add_to_bucket(task, slots, slot, bucket, stays=False)()
    wanted = [0.0] * size
    for i in present:
        wanted[i * step : i * step + 4] = [i + 1.0] * 4
    assert slots[-1].tolist() == wanted


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x).float().logsumexp(-1).mean()


@pytest.mark.parametrize("zero", [0, 3])
def test_products_with_bf16_parameters_are_estimated_in_bf16(zero: int) -> None:
    """Whatever dtype the largest of a chunk's other tensors has."""
    program = piper.trace(Head, torch.randn(4096, 512), lambda model, x: model(x))
    plan = program.apply(parallel(dp=2, zero=zero)).lower(precision="bf16").plan
    hundredth = machine("h100").flops["bfloat16"] / 100  # so that products decide
    found = msgspec.structs.replace(
        machine("h100"), flops={"bfloat16": hundredth, "float32": hundredth / 1000}, launch=0.0
    )
    (party,) = compressed(plan).parties
    seconds = MachineCosts(plan, found).compute(party)
    runs = [(s, t) for s, t in zip(seconds, party.tasks, strict=True) if isinstance(t, Run)]
    assert {task.phase for _, task in runs} == {"F", "B"}
    for taken, task in runs:
        assert taken == pytest.approx(plan.body_flops[task.body] / hundredth), task.name
