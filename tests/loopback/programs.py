"""What tests of single programs share: small models, and how to check or refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.run import Run
from piper.directives.schedule import Schedule
from piper.errors import RunError, TraceError
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device


def random_batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def check(
    make: Callable[[], nn.Module],
    *,
    batch: Callable[[int], Any] = random_batch,
    step: Callable[..., Any] = mean_square,
    strategy: Callable[[Schedule], None] | None = None,
) -> None:
    strategy = strategy or parallel(pp=2, microbatches=2)
    program = piper.trace(lambda: make().double(), batch(0), step).apply(strategy)
    job = program.lower(optimizer=piper.adamw(lr=1e-2))
    batches = [batch(seed) for seed in range(3)]
    reference = train_one_device(job, batches)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary) as run:
            errors = compare(run, batches, reference)
        assert errors.exact, errors


def refused(make: Callable[[], nn.Module], words: str, step: Any = mean_square) -> None:
    with pytest.raises(TraceError, match=words):
        piper.trace(lambda: make().double(), random_batch(0), step)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def run_stages(self, first: Any, second: Any) -> Any:
        with piper.annotate("PP"):
            h = first()
        with piper.annotate("PP"):
            return second(h)


def two(forward: Callable[..., torch.Tensor]) -> type[Two]:
    return type("Model", (Two,), {"forward": forward})


class Sharded(nn.Module):
    """Two experts around `inside(rows, weight, bias, counts)`."""

    def __init__(self, inside: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inside = inside
        self.router, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        gate = self.router(rows)
        expert = gate.argmax(-1)
        counts = torch.zeros(4, dtype=torch.int64).scatter_add(0, expert, expert * 0 + 1)
        order = expert.argsort(stable=True)
        rows = rows.index_select(0, order)
        with piper.annotate("EP"):
            rows = self.inside(rows, self.weight, self.bias, counts)
        out = torch.zeros_like(gate[:, :1]).expand(-1, 6).clone()
        out[order] = rows
        return out * gate.softmax(-1).gather(1, expert[:, None])


GM = piper.grouped_mm


def assert_gives_nothing(run: Run, batch: Any) -> None:
    """Every method of a run that is closed says so."""
    calls: list[Callable[[], object]] = [
        run.parameters, run.masters, run.gradients, run.differing_replicas, run.memory, run.fetch,
        run.describe, run.prepare_evaluation, lambda: run.step(batch), lambda: run.evaluate(batch),
        lambda: run.set_options({"lr": 1.0}), lambda: run.read(lambda share: [batch]),
        lambda: piper.train(run, [batch], steps=1, log="none"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RunError, match="the run is closed"):
            call()
