"""What an oracle must know: dtypes below float64 inside a model, and what is rounding."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.rounding import SAFETY
from piper.training.verdict import Oracle, Verdict, lift_program, verify
from tests.loopback.planted import planted

WIDTH = 6
EPS = torch.finfo(torch.float32).eps


def _batches(num: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 5, WIDTH, generator=generator).double() for _ in range(num)]


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _program(make: type[nn.Module], step: object = _square) -> Program:
    program = piper.trace(lambda: make().double(), _batches()[0], step)  # type: ignore[arg-type]
    return program.apply(parallel(pp=2, dp=2, microbatches=2))


@cache
def _oracle(make: type[nn.Module], steps: int = 1) -> Oracle:
    return Oracle(_program(make), _batches(steps))


def _verdict(make: type[nn.Module], step: object = _square) -> Verdict:
    return verify(_program(make, step), _batches())


class Narrow(nn.Module):
    """A norm in float32, between two layers."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            narrow = self.first(x).to(self.dtype)
            x = (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        with piper.annotate("PP"):
            return self.second(x)


class Narrower(Narrow):
    dtype = torch.bfloat16


def _float32_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def test_islands_are_named_and_lifted() -> None:
    verdict = _verdict(Narrow, _float32_loss)
    assert verdict.exact and verdict.proof.oracle.dtype == "float64"
    lines = Path(__file__).read_text().splitlines()
    found = [(lines[i.source.line - 1].strip(), i) for i in verdict.islands if i.source]
    assert [(line, i.operator, i.dtype) for line, i in found] == [
        ("narrow = self.first(x).to(self.dtype)", "to", "float32"),
        ("return model(batch).float().square().mean()", "float", "float32"),
    ]
    assert verdict.as_written is not None
    errors = verdict.as_written.errors
    assert errors.bounds.gradient == 8 * EPS
    assert errors.loss <= 8 * EPS  # float32 numbers, added up in another order
    assert verdict.proof.errors.loss <= 1e-14


def test_a_narrower_dtype_has_wider_bounds() -> None:
    verdict = _verdict(Narrower)
    assert verdict.exact and [island.dtype for island in verdict.islands] == ["bfloat16"]
    assert verdict.as_written is not None
    assert verdict.as_written.errors.bounds.gradient == 8 * torch.finfo(torch.bfloat16).eps


def test_a_fault_is_seen_through_an_island_once_that_is_lifted() -> None:
    written = _oracle(Narrow)
    lifted = Oracle(lift_program(_program(Narrow)), _batches(1))
    for size, seen_as_written in ((3e-10, False), (1e-6, False), (1e-4, True)):
        with planted("gradient", "first.weight", factor=1 + size):
            with written.job.launch("loopback") as run:
                assert written.errors_of(run).exact != seen_as_written
            with lifted.job.launch("loopback") as run:
                errors = lifted.errors_of(run)
        assert not errors.exact and errors.worst["gradient"] == "first.weight in step 0"


def test_python_code_sees_the_lifted_dtype_in_the_trace_too() -> None:
    """The model reads constants off the dtype; trace and eager mode must read the same."""

    class Reads(Narrow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            narrow = super().forward(x).float()
            return narrow + 1e6 * torch.finfo(narrow.dtype).eps

    verdict = _verdict(Reads)
    assert verdict.exact and verdict.proof.errors.loss <= 1e-14


class Sources(nn.Module):
    """float32 that no cast makes, bits that are read in another way, complex numbers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            places = torch.arange(WIDTH)
            table = torch.linspace(0.1, 1.3, WIDTH) + (places + 1) / 7 + torch.ones(WIDTH) / 3
            x = self.first(x).type(torch.float32) * torch.cos(table)
            x = F.dropout(x, 0.3)
        with piper.annotate("PP"):
            bits = places.to(torch.int32).view(torch.float32)  # denormal
            turned = torch.view_as_complex(self.second(x.double()).float().unflatten(-1, (-1, 2)))
            turned = turned * torch.polar(torch.ones(3), torch.arange(3) / 3)
            return torch.view_as_real(turned).flatten(-2) + bits


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="its Dynamo does not trace lifted casts: verify says float32"
)
def test_every_source_of_float32_is_lifted() -> None:
    verdict = _verdict(Sources)
    assert verdict.exact and verdict.proof.oracle.dtype == "float64"
    assert verdict.proof.errors.gradient <= 1e-13


class Insists(nn.Linear):
    """Code that works in float32 alone."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).float()
        if y.dtype != torch.float32:
            raise ValueError("float32, please")
        return y


def test_what_cannot_be_lifted_is_only_bounded() -> None:
    program = piper.trace(lambda: Insists().double(), _batches()[0], _square)
    verdict = verify(program.apply(parallel(dp=2)), _batches())
    assert verdict.exact and verdict.proof.oracle.dtype == "float32"
    assert verdict.as_written is None and verdict.refusal
    assert verdict.proof.errors.bounds.gradient == 8 * EPS


class Attention(nn.Module):
    """Keys' part of the bias has no gradient: softmax does not see it. `small` has a tiny real one."""

    loss_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.key.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            q, k, v = self.qkv(x).chunk(3, -1)
            x = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        with piper.annotate("PP"):
            scores = x @ self.key(x).transpose(-1, -2)
            x = torch.softmax(scores, -1) @ x + 1e-12 * self.small(x)
            return x * self.loss_scale


def test_a_gradient_without_content_is_rounding_and_named() -> None:
    """Other digits of rounding are no fault; whether a run has others by itself is luck."""
    oracle = _oracle(Attention, 3)
    with planted("gradient", "key.bias", factor=-1.0), oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    assert errors.exact, errors
    assert {(r.name.split(" in ")[0], r.vanishing, r.explained) for r in errors.rounded} == {
        ("key.bias", WIDTH, None)
    }
    assert {r.what for r in errors.rounded} == {"gradient", "parameter"}


def test_a_small_gradient_is_no_rounding() -> None:
    oracle = _oracle(Attention)
    gradients = oracle.reference.gradients[0]
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    assert float(gradients["small.weight"].norm()) < 1e-11 * largest
    for size in (1e-6, 3e-10):
        with (
            planted("gradient", "small.weight", factor=1 + size),
            oracle.job.launch("loopback") as run,
        ):
            errors = oracle.errors_of(run)
        assert not errors.exact and errors.worst["gradient"] == "small.weight in step 0"


def test_more_than_rounding_is_seen_in_a_gradient_without_content() -> None:
    oracle = _oracle(Attention)
    rounding = float(oracle.explained()["gradient", "key.bias in step 0"].max()) / SAFETY
    assert rounding < 1e-14
    for times, exact in ((1, True), (300, False)):
        fault = planted("gradient", "key.bias", factor=1.0, added=times * rounding * 4)
        with fault, oracle.job.launch("loopback") as run:  # sums over 4 microbatches, then a mean
            errors = oracle.errors_of(run)
        assert errors.exact == exact, (times, errors)


class Amplified(Attention):
    """With gradients this large, AdamW makes of their rounding what it makes of gradients."""

    loss_scale = 1e4


def test_rounding_that_adamw_amplifies_excuses_nobody_else() -> None:
    """A third of a bias moves by amplified rounding; the rest of it keeps the tight bound."""
    oracle = _oracle(Amplified, 3)
    other_digits = partial(
        planted, "gradient", "qkv.bias", factor=-1.0, elements=slice(WIDTH, 2 * WIDTH)
    )
    with other_digits(), oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    assert errors.exact, errors
    (fused,) = [r for r in errors.rounded if (r.what, r.name) == ("parameter", "qkv.bias")]
    assert (fused.vanishing, fused.elements, fused.explained) == (WIDTH, 3 * WIDTH, None)
    assert fused.error > 1e-8
    with other_digits(), planted("update", "qkv.bias"), oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    assert not errors.exact and errors.worst["parameter"] == "qkv.bias"


class Cancelling(nn.Module):
    """The gradient is a small difference of large numbers: real, with much rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            y = self.weight * (1e9 * x.square() + x) - self.weight * (1e9 * x.square())
        with piper.annotate("PP"):
            return self.other(y)


def test_a_gradient_with_much_rounding_is_bounded_and_said_to_be() -> None:
    oracle = _oracle(Cancelling, 3)
    explained = oracle.explained()["gradient", "weight in step 0"].norm()
    share = float(explained / oracle.reference.gradients[0]["weight"].norm())
    assert 1e-8 < share < 1e-3
    with planted("gradient", "weight", factor=1 + share / 8), oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    assert errors.exact, errors
    (first,) = [r for r in errors.rounded if r.name == "weight in step 0"]
    assert first.explained == pytest.approx(share) and first.vanishing == 0
    with planted("gradient", "weight", factor=1.01), oracle.job.launch("loopback") as run:
        assert not oracle.errors_of(run).exact


@pytest.mark.parametrize("size", [1e-6, 3e-10])
def test_a_wrong_loss_is_seen(size: float) -> None:
    oracle = _oracle(Attention)
    with planted("loss", factor=1 + size), oracle.job.launch("loopback") as run:
        errors = oracle.errors_of(run)
    assert not errors.exact and errors.worst["loss"] == "step 0"


class Overflowing(Narrow):
    """The least number of its dtype, in a tensor of the default one: it runs in float32 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            return self.second(torch.max(x, torch.full((), torch.finfo(x.dtype).min)))


def test_a_model_that_does_not_run_in_float64_is_told_of_its_line() -> None:
    with pytest.raises(piper.PiperError) as caught:
        _oracle(Overflowing)
    line = Overflowing.forward.__code__.co_firstlineno + 4
    assert f"in float64 at tests/loopback/test_verdict.py:{line}" in str(caught.value), caught.value
    assert "dtype=x.dtype" in (caught.value.legal or "")


class WithoutLoss(Overflowing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            return self.second(x - torch.finfo(x.dtype).max * 2)


def test_a_loss_that_is_no_number_is_nothing_to_compare() -> None:
    with pytest.raises(piper.PiperError, match="the loss of one device is nan in step 1"):
        _oracle(WithoutLoss)
