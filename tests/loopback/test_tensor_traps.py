"""Code that is easily cut wrongly over ranks: exact, or refused with the user's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.errors import TraceError
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.tensor_zoo import CASES, VOCABULARY, Model
from tests.zoo import ADAMW

WAYS: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}]
CASE = CASES["dense"]


class Rounded(torch.autograd.Function):
    """Straight through: its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Rounding(Model):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return Rounded.apply(super().forward(batch))


@pytest.mark.parametrize("degrees", WAYS, ids=str)
def test_a_backward_of_the_users_own_is_refused(degrees: dict[str, Any]) -> None:
    """Gradients in front of it would be lost without a word."""
    program = piper.trace(Rounding, CASE.batch(0), CASE.step)
    said = r"shard_tensor .*: an autograd.Function \(.*test_tensor_traps.py:\d+\) cannot be cut"
    with pytest.raises(TraceError, match=said):
        program.apply(parallel(**degrees)).lower()


class Normed(Model):
    """Running statistics have no parts over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.statistics(super().forward(batch).transpose(1, 2)).transpose(1, 2)


def test_code_that_cannot_be_cut_is_refused_with_the_directive_and_the_chunk() -> None:
    program = piper.trace(Normed, CASE.batch(0), CASE.step)
    said = r"shard_tensor \(.*test_tensor_traps.py:\d+\): the chunk changes buffers"
    with pytest.raises(TraceError, match=said) as refused:
        program.apply(parallel(tp=2)).lower()
    assert "in F[PP=1]" in str(refused.value)


def _soft(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Probabilities of classes as targets."""
    classes = F.one_hot(batch["tokens"].flatten(), VOCABULARY).double() * 0.8 + 0.2 / VOCABULARY
    return F.cross_entropy(model(batch).flatten(0, 1), classes)


class Dropped(Model):
    """What both stages read becomes one tensor where nothing is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, route = self.embed(batch["tokens"]), batch["route"]
        with piper.annotate("PP"):
            x = self.blocks[0](x, route)
            y = self.dropout(x)
        with piper.annotate("PP"):
            x = x + self.blocks[1](y, route)
        return self.head(self.norm(x))


def _check(make_model: Any, step: Any, degrees: dict[str, Any]) -> piper.Job:
    batches = [CASE.batch(seed) for seed in range(2)]
    program = piper.trace(lambda: make_model().double(), batches[0], step)
    job = program.apply(parallel(**degrees)).lower(optimizer=ADAMW)
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors
    return job


@pytest.mark.parametrize("degrees", WAYS, ids=str)
def test_probabilities_as_targets(degrees: dict[str, Any]) -> None:
    _check(Model, _soft, degrees)


@pytest.mark.parametrize("degrees", WAYS, ids=str)
def test_two_results_that_are_one_in_an_evaluation(degrees: dict[str, Any]) -> None:
    job = _check(Dropped, CASE.step, {**degrees, "pp": 2, "microbatches": 2})
    assert job.evaluation().plan.train is False


# What is read along the sequence by code that no gradient leaves.
SILENT = {
    "flip": lambda h: h * h.flip(1).detach(),
    "argmax": lambda h: h + h.argmax(1, keepdim=True) * 0.01,
    "mean": lambda h: h * h.mean(1, keepdim=True).detach(),
}


@pytest.mark.parametrize("degrees", [*WAYS[1:], {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", SILENT)
def test_readers_without_a_gradient(name: str, degrees: dict[str, Any]) -> None:
    class Silent(Model):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            x = self.embed(batch["tokens"])
            for block in self.blocks:
                x = SILENT[name](block(x, batch["route"]))
            return self.head(self.norm(x))

    _check(Silent, CASE.step, degrees)


class Weights(Model):
    """What is made of weights alone crosses a stage."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, route = self.embed(batch["tokens"]), batch["route"]
        with piper.annotate("PP"):
            x, twice = self.blocks[0](x, route), self.embed.weight * 2
        with piper.annotate("PP"):
            x = self.blocks[1](x, route)
            return self.head(self.norm(x)) + F.linear(x, twice)


def test_what_is_made_of_weights_crosses_stages() -> None:
    _check(Weights, CASE.step, {"pp": 2, "tp": 2, "sp": True, "dp": 2, "microbatches": 2})
