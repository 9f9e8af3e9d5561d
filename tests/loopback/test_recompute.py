"""recompute: less is saved, expensive work is not repeated, random numbers come again."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.bodies.cutting.body_memory import refuse_shared_memory
from piper.bodies.files.allowed_operators import operator_of
from piper.bodies.files.codec import decode, encode, load
from piper.errors import PlanError
from piper.plan.report.summary import slot_bytes
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.loopback.pools import loopback
from tests.loopback.storages import unique_bytes
from tests.zoo import ADAMW, WIDTH, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("recompute")  # its jobs are made once

PIPELINES: dict[str, dict[str, Any]] = {
    "one": {"microbatches": 8},
    "gpipe": {"pp": 2, "microbatches": 8, "schedule": "gpipe"},
    "zb_h1": {"pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "schedule": "zb_h1"},
}
KEEPS = (None, "expensive", "nothing")


@cache
def _job(name: str, pipeline: str, keep: Any) -> Job:
    strategy = parallel(**PIPELINES[pipeline], recompute=keep)
    return program_of(name).apply(strategy).lower(optimizer=ADAMW)


def _planned(job: Job) -> int:
    """Bytes of all slots that are saved from a forward to a backward."""
    names = [(s.name, slot_bytes(s)) for part in job.plan.classes for s in part.slots]
    saved = (each for each in names if each[0].startswith("$saved.") and ".R[" not in each[0])
    return sum(size for _, size in saved)


def _saved(worker: Worker) -> list[Tensor]:
    pairs = zip(worker.use, worker.slots, strict=True)
    return [tensor for use, tensor in pairs if use == "saved" and isinstance(tensor, Tensor)]


def _measured(job: Job, name: str) -> int:
    """The most bytes, summed over ranks, of storages that only backwards still read."""
    most: dict[int, int] = defaultdict(int)

    def look(worker: Worker) -> None:
        saved = unique_bytes(_saved(worker))
        most[worker.me.rank] = max(most[worker.me.rank], saved)

    run = Run(job.plan, loopback(job.plan, job.bodies, observe=look))
    run.step(batches_of(name)[0])
    return sum(most.values())


@pytest.mark.parametrize("pipeline", ["gpipe", "zb_h1"])
def test_saved_bytes_drop_in_the_plan_and_in_memory(pipeline: str) -> None:
    planned = [_planned(_job("moe", pipeline, keep)) for keep in KEEPS]
    measured = [_measured(_job("moe", pipeline, keep), "moe") for keep in KEEPS]
    assert planned[0] > planned[1] > planned[2] == 0
    assert measured[0] > measured[1] > measured[2]
    if pipeline == "gpipe":  # a BI hands on to BW what it has computed again
        assert measured[2] < 0.6 * measured[0]


@pytest.mark.parametrize("name", ["dense", "moe", "tied", "dropout"])
def test_under_nothing_a_forward_hands_out_its_outputs_alone(name: str) -> None:
    """And a backward reads its forward's inputs: it makes everything else itself."""
    job = _job(name, "zb_h1" if name != "dense" else "gpipe", "nothing")
    for node in job.graph.chunks:
        if node.phase == "F":
            values = [job.graph.values[value] for value in node.outputs]
            assert all(v.role in ("activation", "loss", "count") for v in values), node.name
        else:
            forward = job.graph.nodes[node.forward]
            made = set(forward.outputs)
            assert not made & set(node.inputs), node.name


def _products(job: Job, phase: str) -> int:
    """Matrix products and attention of all bodies of a phase."""
    ours = ("piper::grouped_mm", "piper::grouped_mm_weight")
    total = 0
    for node in job.graph.chunks:
        if node.phase == phase:
            for called in decode(job.bodies[node.body]).graph.nodes:
                packet = getattr(called.target, "overloadpacket", None)
                name = str(getattr(packet, "_qualified_op_name", ""))
                total += packet in flop_registry or name in ours or "attention" in name
    return total


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_expensive_work_is_kept_and_not_repeated(name: str) -> None:
    counts = {keep: _products(_job(name, "one", keep), "B") for keep in KEEPS}
    assert counts["expensive"] == counts[None] > 0
    assert counts["nothing"] > counts[None]
    forward = {_products(_job(name, "one", keep), "F") for keep in KEEPS}
    assert len(forward) == 1


@pytest.mark.parametrize("keep", ["expensive", "nothing"])
@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_randomness_is_replayed(pipeline: str, keep: str) -> None:
    """Dropout in the backward's forward drops what it dropped before."""
    job = _job("dropout", pipeline, keep)
    with job.launch("loopback", adversary=True, seed=4) as run:
        errors = compare(run, batches_of("dropout"), reference_of("dropout", job))
    assert errors.exact, errors


def test_other_random_numbers_in_a_backward_would_be_seen() -> None:
    """With keys of another step in all backwards, gradients come out otherwise."""
    job = _job("dropout", "one", "nothing")
    with job.launch("loopback") as run:
        (worker,) = run.workers.workers  # type: ignore[attr-defined]
        keys = {i for i, slot in enumerate(worker.me.slots) if slot.kind == "key"}
        spoilt = 0
        for index, task in enumerate(worker.me.tasks):
            if getattr(task, "phase", "") == "B" and keys & set(task.reads):
                worker.starts[index] = _spoiling(
                    worker, keys & set(task.reads), worker.starts[index]
                )
                spoilt += 1
        assert spoilt
        errors = compare(run, batches_of("dropout"), reference_of("dropout", job))
    assert errors.gradient > 1e-3


def _spoiling(worker: Worker, keys: set[int], start: Any) -> Any:
    def spoilt() -> Any:
        for slot in keys:
            worker.slots[slot] = worker.slots[slot] + 1
        return start()

    return spoilt


class Crossing(nn.Module):
    """A norm's result feeds a Linear and crosses the region inside: BW reads what F handed out."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            with piper.annotate("PP"):
                normed = norm(x)
                inner = torch.tanh(linear(normed))
                crossing = normed.flatten() if self.flat else normed
                with piper.annotate("IN"):
                    inner = torch.sigmoid(inner)
                x = crossing.view(x.shape) + inner
        return x


@pytest.mark.parametrize("flat", [False, True])
def test_a_bw_is_given_memory_of_its_own(flat: bool) -> None:
    """A BI that computed a norm again handed on the forward's result, which is freed after it."""
    batches = [torch.randn(16, 3, WIDTH, dtype=torch.float64) for _ in range(2)]
    strategy = parallel(pp=3, microbatches=8, schedule="zb_h2", recompute="expensive")
    program = piper.trace(
        lambda: Crossing(flat).double(), batches[0], lambda m, x: m(x).square().mean()
    )
    job = program.apply(strategy).lower(optimizer=ADAMW)
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors


def _body(*operators: str) -> fx.Graph:
    """Two arguments, and the results of calls of `operators` on the first."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    args = {
        "view": (x, [-1]),
        "split": (x, 2),
        "add_": (x, y),
        "clone": (x,),
        "_unsafe_view": (x, [4]),
    }
    made = [
        graph.call_function(operator_of(f"aten.{name}.{o}"), args[name])
        for name, _, o in (operator.partition(".") for operator in operators)
    ]
    graph.output(tuple(made))
    return graph


@pytest.mark.parametrize("operator", ["view.default", "add_.Tensor", "_unsafe_view.default"])
def test_a_body_whose_result_lies_in_an_argument_is_refused(operator: str) -> None:
    refuse_shared_memory(_body("clone.default"))
    with pytest.raises(PlanError, match="result 1 of a body lies in the memory of its argument 0"):
        refuse_shared_memory(_body("clone.default", operator))
    with pytest.raises(PlanError, match="result 0 of a body lies in the memory of its argument 0"):
        load(encode(_body(operator)))


def test_a_body_that_gives_an_element_of_an_argument_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(getitem, (graph.placeholder("x"), 0)),))
    with pytest.raises(PlanError, match="result 0 of a body lies in the memory of its argument 0"):
        load(encode(graph))


def test_a_body_with_two_results_in_one_memory_is_refused() -> None:
    graph = fx.Graph()
    halves = graph.call_function(
        torch.ops.aten.split.Tensor, (graph.call_function(torch.ops.aten.ones.default, ([4],)), 2)
    )
    graph.output(tuple(graph.call_function(getitem, (halves, i)) for i in range(2)))
    with pytest.raises(PlanError, match="result 1 of a body lies in the memory of its result 0"):
        load(encode(graph))


def test_a_body_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cut that copies nothing, the gradient of an input is the tangent itself."""
    monkeypatch.setattr("piper.bodies.cutting.partition._fresh", lambda graph, node: node)
    batch = torch.randn(4, WIDTH)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with piper.annotate("PP"):
                x = self.linears[0](x)
            with piper.annotate("PP"):
                x = x + self.linears[1].bias
            with piper.annotate("PP"):
                return self.linears[1](x)

    program = piper.trace(Sum, batch, lambda m, x: m(x).square().mean())
    with pytest.raises(PlanError, match="lies in the memory of its argument"):
        program.apply(parallel(pp=3, microbatches=2)).lower(optimizer=ADAMW)
