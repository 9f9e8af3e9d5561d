"""Law 1 for a model without tags and without experts, which strategies cut into stages themselves."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import piper
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, PIECES, Case, Untagged, batches_of

CASE = Case("bare", lambda: Untagged(experts=False, num_stages=8))  # with experts: in test_parity
pytestmark = pytest.mark.xdist_group("bare")


@cache
def _program() -> Program:
    return piper.trace(CASE.model, CASE.batch(0), CASE.step)


@pytest.mark.parametrize("bucket_size", [None, 512])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("pp", [2, 4])
def test_trains_like_one_device(pp: int, schedule: str, bucket_size: int | None) -> None:
    made = piper.schedules.schedule(schedule, num_ranks=pp, num_microbatches=PIECES)

    def by_hand(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=pp, dp=1)
        s.cut("PP", made.num_stages)
        for stage in range(made.num_stages):
            s.place(piper.where(PP=stage), mesh.at(pp=stage % pp))
        s.replicate(piper.where(), over="dp", bucket_size=bucket_size)
        s.split(piper.where(), "MB", PIECES)
        s.order(made)

    strategy = by_hand if bucket_size else parallel(pp=pp, schedule=schedule, microbatches=PIECES)
    job = _program().apply(strategy).lower(optimizer=ADAMW)
    values = {node.tag("PP") for node in job.graph.chunks}
    assert values == set(range(pp if schedule == "1f1b" else 2 * pp))
    assert (len(job.graph.chunks) > 2 * PIECES * len(values)) == bool(bucket_size)
    batches = batches_of("dense")
    reference = train_one_device(job, batches)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=3) as run:
            errors = compare(run, batches, reference)
        assert errors.exact, errors


class Positions(nn.Module):
    """Adds an expand where there are several rows, as masks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6.0, dtype=x.dtype)[None]
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        x = x + places
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_stages_begin_at_the_same_code_with_a_single_row() -> None:
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(2)]
    program = piper.trace(
        lambda: Positions().double(), batches[0], lambda model, x: model(x).pow(2).mean()
    )
    job = program.apply(parallel(pp=2, dp=2, microbatches=4)).lower(optimizer=ADAMW)
    reference = train_one_device(job, batches)
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches, reference)
    assert errors.exact, errors


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_of_large_chunks_are_reduced_beside_their_backward(
    pp: int, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is large enough comes in pieces, of at most so many."""
    monkeypatch.setattr("piper.passes.piece_sizes.SMALLEST", 400)
    monkeypatch.setattr("piper.passes.physical.buckets.WHOLE_SIZE", 400)
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(2)]
    program = piper.trace(
        lambda: Positions().double(), batches[0], lambda model, x: model(x).pow(2).mean()
    )
    degrees = {"pp": pp, "dp": 2, "zero": zero, "microbatches": 2}
    job = program.apply(parallel(**degrees)).lower(optimizer=ADAMW)
    assert len({node.chunk for node in job.graph.chunks}) == 4
    for found in job.plan.classes:
        backwards = [i for i, task in enumerate(found.tasks) if getattr(task, "phase", "") == "B"]
        reduced = [
            i for i, task in enumerate(found.tasks) if task.name.startswith(("reduce.", "scatter>"))
        ]
        assert reduced[0] < backwards[-1], "beside it"
    reference = train_one_device(job, batches)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=3) as run:
            errors = compare(run, batches, reference)
        assert errors.exact, errors
    alone = program.apply(parallel(pp=pp, microbatches=2)).lower(optimizer=ADAMW)
    assert len({node.chunk for node in alone.graph.chunks}) == pp, "there is nothing to reduce"
