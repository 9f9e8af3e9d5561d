"""A step that returns a sum is averaged, and that is said; a mean, or what nobody can know, is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.frontend.refuse.loss_growth import growing_sum
from piper.strategies import parallel

Step = Callable[[nn.Module, Tensor], Any]


def _in_place(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss /= len(x)
    return loss


def _masked(losses: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mask = x[..., 0] > 0
    return losses * mask, mask


def _perplexity(m: nn.Module, x: Tensor) -> Tensor:
    losses, mask = _masked(F.cross_entropy(m(x), x.argmax(-1), reduction="none"), x)
    return losses.sum() / mask.sum()


SUMS: dict[str, Step] = {
    "sum": lambda m, x: m(x).square().sum(),
    "torch.sum": lambda m, x: torch.sum(m(x).square()),
    "rows only": lambda m, x: m(x).square().mean(-1).sum(),
    "rows, then a mean": lambda m, x: m(x).square().sum(0).mean(),
    "scaled": lambda m, x: 0.5 * m(x).square().sum() / 64,
    "cross entropy": lambda m, x: F.cross_entropy(m(x), x.argmax(-1), reduction="sum"),
    "a module": lambda m, x: nn.MSELoss(reduction="sum")(m(x), x),
    "with another loss": lambda m, x: F.mse_loss(m(x), x, reduction="sum") + m.weight.square().mean(),
    "masked": lambda m, x: _masked(m(x).square().mean(-1), x)[0].sum(),
    "dropout": lambda m, x: F.dropout(m(x), 0.5).square().sum(),
    "of a growing number": lambda m, x: m(x).square().mean() * x.shape[0],
    "an activation in place": lambda m, x: F.relu(m(x), inplace=True).sum(),
}  # fmt: skip
OTHERS: dict[str, Step] = {
    "mean": lambda m, x: m(x).square().mean(),
    "cross entropy": lambda m, x: F.cross_entropy(m(x), x.argmax(-1)),
    "of all": lambda m, x: m(x).square().sum() / x.shape[0],
    "of elements": lambda m, x: m(x).square().sum() / x.numel(),
    "divided first": lambda m, x: (m(x).square() / len(x)).sum(),
    "times a share": lambda m, x: m(x).square().sum() * (1.0 / len(x)),
    "columns": lambda m, x: m(x).square().sum(-1).mean(),
    "batchmean": lambda m, x: F.kl_div(
        m(x).log_softmax(-1), x.softmax(-1), reduction="batchmean"
    ),
    "masked": _perplexity,
    "masked and safe": lambda m, x: (
        m(x).square().sum() / (x > 0).sum().clamp(min=1)
    ),
    "a tensor of the size": lambda m, x: m(x).square().sum() / torch.tensor(float(len(x))),
    "in place": _in_place,
    "weights over the batch": lambda m, x: (m(x).square() * x.softmax(0)).sum(),
    "a norm": lambda m, x: m(x).norm(),
    "largest": lambda m, x: m(x).square().max(),
    "contrast": lambda m, x: F.cross_entropy(m(x) @ x.T, torch.arange(len(x))),
    "sum and count": lambda m, x: (m(x).square().sum(), x.shape[0]),
    "sum of parameters": lambda m, x: m(x).square().mean() + m.weight.square().sum(),
}  # fmt: skip


def _source(step: Step) -> Any:
    return piper.trace(lambda: nn.Linear(6, 6), torch.randn(8, 6), step).source


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_found(name: str) -> None:
    source = _source(SUMS[name])
    line = growing_sum(source.captured(4), source.captured(8))
    assert line is not None and line.file == __file__


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_loss_is_called_a_sum(name: str) -> None:
    source = _source(OTHERS[name])
    assert growing_sum(source.captured(4), source.captured(8)) is None


def test_a_sum_that_is_averaged_is_said() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    program = piper.trace(lambda: nn.Linear(6, 6), torch.randn(8, 6), step)
    line = step.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning) as said:
        program.apply(parallel(dp=2, microbatches=2)).lower()
    (warning,) = said
    words = f"step returns a sum over the batch (tests/null/test_loss_growth.py:{line})"
    assert words in str(warning.message) and "(sum, count)" in str(warning.message)
    assert "over 4 global microbatches" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.lower()  # one microbatch: a sum is what it is
