"""Counts of experts leave before rows are taken: the order of tasks, and what is left whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Schedule, where
from piper.api.job import Job
from piper.cost.presets import machine
from piper.sim.simulate import simulate
from piper.strategies import parallel

WIDTH, EXPERTS, TOP = 8, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return x + piper.mixture(self.experts, x, chosen, weights, num_experts=EXPERTS)

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        return F.silu(piper.grouped_mm(rows, self.weight, counts))


class RowsFirst(Layer):
    """Takes its rows before it counts them."""

    def forward(self, x: Tensor) -> Tensor:
        expert = self.router(x).argmax(-1)
        order = expert.argsort()
        rows = x.index_select(0, order)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, expert, expert * 0 + 1)
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        return x.index_add(0, order, rows)


class Stages(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return x


def _job(
    strategy: Callable[[Schedule], None],
    *,
    layer: Callable[[], nn.Module] = Layer,
    stages: int = 2,
) -> Job:
    batch = torch.ones(16, WIDTH)
    program = piper.trace(
        lambda: Stages(layer, stages), batch, lambda model, x: model(x).pow(2).mean()
    )
    return program.apply(strategy).lower()


SHARDED = parallel(pp=2, dp=2, ep=2, microbatches=4, schedule="1f1b")


def _forwards(job: Job) -> list[str]:
    return [n.name for n in job.graph.chunks if n.phase == "F" and n.tag("MB") == 0]


def test_counts_leave_before_rows_are_taken() -> None:
    job = _job(SHARDED)
    for part in job.plan.classes:
        at = {task.name: index for index, task in enumerate(part.tasks)}
        for name in (name for name in at if name.startswith("counts>")):
            region = name.removeprefix("counts>")
            stage, _, microbatch = region.split(",")
            routing, taking = (f"{stage}.{piece},{microbatch}" for piece in (0, 1))
            order = [routing, name, taking, f"read>{region}", f"rows0>{region}", region]
            assert [at[task] for task in order] == sorted(at[task] for task in order), order
            assert at[name] == at[routing] + 1


def test_the_exchange_of_counts_runs_beside_the_taking() -> None:
    job = _job(SHARDED)
    prompt = msgspec.structs.replace(machine("h100"), dispatch=0.0, exchange=0.0)
    [track, *_] = simulate(job.plan, prompt).tracks
    spans = {span.label.name: span for span in track}
    counts, taking = spans["counts>F[PP=0,EP=0,MB=0]"], spans["F[PP=0.1,MB=0]"]
    assert taking.start < counts.end and counts.start < taking.end
    assert spans["read>F[PP=0,EP=0,MB=0]"].issued >= taking.issued


def test_only_rows_are_left_to_the_second_chunk() -> None:
    graph = _job(SHARDED).graph
    routing, taking = graph.nodes["F[PP=0.0,MB=0]"], graph.nodes["F[PP=0.1,MB=0]"]
    assert "%counts[MB=0]" in routing.outputs
    assert taking.outputs == ("%taken[MB=0]",)
    assert not any(graph.values[name].role == "param" for name in taking.inputs)


def _turns(s: Schedule) -> None:
    """Forwards and backwards of neighbouring microbatches take turns."""
    s.mesh(ep=2)
    s.replicate(where(EP=None), over="ep")
    s.shard(where(EP="*"), over="ep")
    s.split(where(), "MB", 2)
    s.order([where(MB=0, phase="F"), [where(MB=1, phase="F"), where(MB=0, phase="B")]])


@pytest.mark.parametrize(
    ("strategy", "layer", "stages"),
    [
        (parallel(dp=2, ep=1, microbatches=2), Layer, 1),
        (parallel(dp=2, ep=2, microbatches=2), RowsFirst, 1),
        (parallel(pp=2, dp=2, ep=2, microbatches=4, schedule="dualpipev"), Layer, 4),
        (_turns, Layer, 1),
    ],
    ids=["not sharded", "rows come first", "dualpipev", "in turns"],
)
def test_what_stays_whole(
    strategy: Callable[[Schedule], None], layer: Callable[[], nn.Module], stages: int
) -> None:
    names = _forwards(_job(strategy, layer=layer, stages=stages))
    assert len(names) == 3 * stages, names
