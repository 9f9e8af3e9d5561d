"""What ranks hold, put together: optimizer state, and initial values of any box; and nothing else."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.errors import RunError
from piper.ir.layouts import Split
from piper.ir.tensor_type import TensorType
from piper.mesh import Mesh, Slice
from piper.plan.holdings import holdings
from piper.plan.optimizers import KNOWN, state_pieces, state_size
from piper.plan.slots import Slot
from piper.plan.types import Bucket, ModelTensor, ParamGroup, Plan, RankClass
from piper.runtime.torch_optimizers import make_optimizer
from piper.runtime.transport.null import NullTransport
from piper.runtime.worker import weights as weights_module
from piper.runtime.worker.assemble import differing_copies, whole_tensors
from piper.runtime.worker.weights import initial_value
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from tests.loopback.programs import Sharded, mean_square, random_batch
from tests.zoo import ADAMW, program_of

OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}


def _model() -> nn.Module:
    return Sharded(lambda rows, w, b, n: piper.grouped_mm(rows, w, n)).double()


def _state_on_one_device(steps: int) -> dict[str, dict[str, torch.Tensor]]:
    """torch's own AdamW on the untouched module."""
    job = piper.trace(_model, random_batch(0), mean_square).lower(optimizer=piper.adamw(lr=1e-2))
    with job.launch("single") as run:
        weights = run.parameters()
    model = _model()
    model.load_state_dict(weights | {"bias": model.get_parameter("bias").detach()})
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "bias"], lr=1e-2)
    for seed in range(steps):
        optimizer.zero_grad()
        mean_square(model, random_batch(seed)).backward()
        optimizer.step()
    return {n: optimizer.state[p] for n, p in model.named_parameters() if n != "bias"}


@pytest.mark.parametrize(
    "degrees",
    [{}, {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 4, "zero": 2}, {"dp": 4, "ep": 2, "zero": 3}],
    ids=str,
)
def test_optimizer_state_is_that_of_one_device(degrees: dict[str, int]) -> None:
    wanted = _state_on_one_device(3)
    program = piper.trace(_model, random_batch(0), mean_square)
    job = program.apply(parallel(**degrees)).lower(optimizer=piper.adamw(lr=1e-2))
    with job.launch("loopback") as run:
        before = run.optimizer_state()
        assert before.keys() == wanted.keys() and not any(before.values())
        for seed in range(3):
            run.step(random_batch(seed))
        found = run.optimizer_state()
        assert run.differing_replicas() == []
    assert found.keys() == wanted.keys()
    for name, pieces in wanted.items():
        assert found[name].keys() == pieces.keys() == {"exp_avg", "exp_avg_sq", "step"}
        for piece, value in pieces.items():
            assert found[name][piece].shape == value.shape
            error = (found[name][piece] - value).norm() / value.norm()
            assert error < 1e-8, (name, piece)
        assert float(found[name]["step"]) == 3


@pytest.mark.parametrize("name", [name for name in KNOWN if hasattr(torch.optim, name)])
def test_pieces_of_state_are_torchs_own(name: str) -> None:
    group = ParamGroup(name, {"lr": 1e-2, **OPTIONS.get(name, {})})
    shapes = [(4, 6)] if name == "Muon" else [(4, 6), (5,)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    real = make_optimizer(group, params)
    for param in params:
        param.grad = torch.ones_like(param)
    real.step()
    for param in params:
        shape = tuple(param.shape)
        pieces = dict(state_pieces(group, shape))
        kept = {k: v for k, v in real.state[param].items() if v is not None}
        assert pieces.keys() == kept.keys()
        elements = sum(kept[k].numel() for k, form in pieces.items() if form != "number")
        numbers = sum(form == "number" for form in pieces.values())
        assert (elements, numbers) == state_size(group, shape)
        for piece, form in pieces.items():
            assert (tuple(torch.as_tensor(kept[piece]).shape) == shape) == (form == "elements")


def _plan_of_boxes(job: Job) -> Plan:
    """The tensors of a job on a mesh that cuts them along any dims: alone, flat and in shards."""
    mesh = Mesh((("ep", 2), ("tp", 3), ("dp", 2)))
    cuts = {
        "weight": (("ep", Split(0)), ("tp", Split(2))),
        "router.weight": (("tp", Split(1)), ("ep", Split(0))),
    }
    tensors = {
        name: msgspec.structs.replace(tensor, cut=cuts.get(name, ()))
        for name, tensor in job.plan.tensors.items()
    }
    bucket = Bucket(
        name="b0",
        params=("weight", "router.weight"),
        shapes=((2, 6, 2), (2, 2)),
        offsets=(0, 24),
        size=32,
        dtype="float64",
        master="float64",
        sums="float64",
        wire="float64",
        state="float64",
        slices=(Slice(()),),
        over=("dp",),
        trained=False,
    )
    slots = (
        Slot("$shard", "shard", TensorType((16,), "float64"), bucket=0),
        Slot("router.bias", "param", TensorType((4,), "float64"), source="router.bias"),
    )
    part: RankClass = RankClass(Slice(()), slots, (), {})
    changes: dict[str, Any] = {"mesh": mesh, "classes": (part,), "tensors": tensors, "groups": ()}
    return msgspec.structs.replace(job.plan, buckets=(bucket,), data_axes=("dp",), **changes)


def test_initial_values_of_any_box_come_together_again() -> None:
    job = piper.trace(_model, random_batch(0), mean_square).lower(optimizer=ADAMW)
    plan = _plan_of_boxes(job)

    def worker(rank: int) -> Worker:
        return Worker(plan, rank, bodies=job.bodies, transport=NullTransport())

    held = [worker(rank).tensors("param") for rank in range(plan.mesh.size)]
    assert held[0].keys() == {"weight[0:16]", "router.bias"}
    assert held[1].keys() == {"weight[16:24]", "router.weight", "router.bias"}
    whole = whole_tensors(plan, "param", held)
    assert whole.keys() == {"weight", "router.weight", "router.bias"}
    for name, value in whole.items():
        wanted = initial_value(job.plan.tensors[name], job.bodies, seed=job.plan.seed)
        assert torch.equal(value, wanted), name
    assert differing_copies(plan, "param", held) == []
    held[5]["router.bias"] = held[5]["router.bias"] + 1
    assert differing_copies(plan, "param", held) == ["router.bias"]
    del held[7]["router.weight"]
    with pytest.raises(RunError, match=r"no rank holds 4 of 24 elements of router\.weight"):
        whole_tensors(plan, "param", held)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_makes_only_what_it_holds(zero: int) -> None:
    job = program_of("tied").apply(parallel(pp=2, dp=4, ep=2, zero=zero, microbatches=2)).lower()
    made: dict[int, list[int]] = defaultdict(list)
    names = {id(tensor): name for name, tensor in job.plan.tensors.items()}
    real = weights_module.initial_value

    for rank in range(job.plan.mesh.size):

        def seen(tensor: ModelTensor, *args: Any, at: int = rank, **more: Any) -> torch.Tensor:
            made[at].append(id(tensor))
            return real(tensor, *args, **more)

        with mock.patch.object(weights_module, "initial_value", seen):
            Worker(job.plan, rank, bodies=job.bodies, transport=NullTransport())
        held = {h.tensor for h in holdings(job.plan, rank) if h.what in ("param", "buffer")}
        assert sorted(names[tensor] for tensor in made[rank]) == sorted(held)
    if zero == 3:  # no rank makes all that its stage has
        stage = {names[t] for rank in range(4) for t in made[rank]}
        assert all(len(set(made[rank])) < len(stage) for rank in range(4))
