"""Programs that cannot be trained exactly, or not yet: refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import where
from piper.directives.schedule import Schedule
from piper.errors import MeshError, OrderError, PlanError, TraceError
from piper.strategies import parallel
from tests.loopback.programs import (
    GM,
    Sharded,
    Two,
    assert_gives_nothing,
    mean_square,
    random_batch,
    refused,
    two,
)


def test_changes_in_place_that_cannot_be_kept_are_refused() -> None:
    def by_position(self: Two, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            g = self.b(h * 1)
        with piper.annotate("PP", 0):
            F.relu(h, True)
        with piper.annotate("PP", 1):
            return g + h

    refused(two(by_position), "changed in place that other regions made or have read")


def test_complex_parameters_are_refused() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.randn(6, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.c).abs()

    with pytest.raises(TraceError, match="parameter c is complex"):
        piper.trace(Complex, random_batch(0), mean_square)


def test_operators_with_code_inside_are_refused() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.cond(x.sum() > 0, self.a, self.c, (x,)))

    refused(two(forward), r"cond is not supported \(.*test_refusals.*\n.*plain operators")


def test_orders_of_communication_that_cannot_be_are_refused() -> None:
    model = two(lambda self, x: self.run_stages(lambda: self.a(x), self.b))

    def crossed(s: Schedule) -> None:
        parallel(pp=2, microbatches=2)(s)
        s.order([where(comm="recv", PP=1, MB=1), where(comm="recv", PP=1, MB=0)])

    program = piper.trace(lambda: model().double(), random_batch(0), mean_square)
    with pytest.raises(OrderError, match=r"order \(.*test_refusals.*wait for each other"):
        program.apply(crossed).lower()


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (lambda r, w, b, c: GM(r, w, c) - r.mean(0), "rows: mean"),
        (lambda r, w, b, c: GM(r, w, c) - r.max(0).values, "rows: max"),
        (lambda r, w, b, c: GM(r, w, c) - r.sort(0).values, "rows: sort"),
        (lambda r, w, b, c: GM(r, w, c) - r.roll(1, 0), "rows: roll"),
        (lambda r, w, b, c: (r @ r.T).softmax(-1) @ GM(r, w, c), "rows: permute"),
        (lambda r, w, b, c: GM(r, w, c) + b.mean(0), "experts: mean"),
        (lambda r, w, b, c: GM(r, w.softmax(0), c), "experts: _softmax"),
        (lambda r, w, b, c: GM(r, w, c) @ w[0], "experts: select"),
        (lambda r, w, b, c: GM(r, w * (c / 10).view(-1, 1, 1), c), "counts with values"),
        (lambda r, w, b, c: GM(r, w, c) * (1 + c.sum()), "rows: mul"),
    ],
)
def test_regions_that_cannot_be_sharded_are_refused(inside: Any, what: str) -> None:
    program = piper.trace(lambda: Sharded(inside).double(), random_batch(0), mean_square)
    with pytest.raises(TraceError, match=f"the sharded region mixes {what}"):
        program.apply(parallel(dp=2, ep=2, microbatches=2)).lower()


def test_a_metric_is_no_count() -> None:
    """Returning (loss, accuracy) would divide by the accuracy."""

    def step(model: nn.Module, batch: torch.Tensor) -> Any:
        out = model(batch)
        return out.square().mean(), (out > 0).double().mean()

    refused(two(lambda self, x: self.a(x)), r"step's count depends on parameter a\.", step)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: self.a(x) / x.abs().max().item(), "takes a number out of a tensor"),
        (
            lambda self, x: self.a(x) * torch.bincount(x.long().flatten().abs()).sum(),
            "depends on data",
        ),
        (lambda self, x: self.a(x[..., :3]), r"the step raises .*3\] X \[6"),
        (lambda self, x: self.nothing(x), "has no attribute 'nothing'"),
    ],
)
def test_what_does_not_trace_says_why(forward: Any, words: str) -> None:
    refused(two(forward), words)


def test_state_that_forward_changes_is_warned_of() -> None:
    def forward(self: Two, x: torch.Tensor) -> torch.Tensor:
        self.n = getattr(self, "n", 0) + 1
        return self.a(x) / self.n

    line = forward.__code__.co_firstlineno + 1
    words = rf"changes Python state, which no step will do: model \(.*test_refusals.py:{line}\)$"
    with pytest.warns(UserWarning, match=words):
        piper.trace(lambda: two(forward)().double(), random_batch(0), mean_square)


def test_wrong_arguments_of_the_interface() -> None:
    model = two(lambda self, x: self.a(x))
    with pytest.raises(TraceError, match="legal: a function that makes it"):
        piper.trace(model(), random_batch(0), mean_square)
    program = piper.trace(lambda: model().double(), random_batch(0), mean_square)
    with pytest.raises(PlanError, match=r"legal: piper.adamw"):
        program.lower(optimizer="adamw")  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=r"legal: a slice: mesh.at"):
        program.apply(lambda s: s.place(where(), s.mesh(pp=1)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="did you mean 'place'"):
        program.apply(lambda s: s.plcae(where()))


@pytest.mark.parametrize("launcher", ["loopback", "single"])
def test_a_closed_run_gives_nothing(launcher: str) -> None:
    program = piper.trace(two(lambda self, x: self.a(x)), random_batch(0).float(), mean_square)
    run = program.lower().launch(launcher)
    run.step(random_batch(0).float())
    run.close()
    assert_gives_nothing(run, random_batch(0).float())
    run.close()


def test_a_batch_size_in_the_code_is_named() -> None:
    model = two(lambda self, x: self.a(x.view(40, 6)))
    program = piper.trace(lambda: model().double(), random_batch(0), mean_square)
    with pytest.raises(TraceError, match="with 4 samples, one rank's microbatch"):
        program.apply(parallel(dp=2)).lower()
