"""Matrices for which torch.linalg raises: a step gives NaN; those that it takes train as ever."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.training.verify import compare, train_one_device

BATCH = torch.ones(2, 2, dtype=torch.float64)
INDEFINITE, SINGULAR, GOOD = (
    [[1.0, 2.0], [2.0, 1.0]],
    [[1.0, 2.0], [2.0, 4.0]],
    [[2.0, 1.0], [1.0, 2.0]],
)
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], list[list[float]]]] = {
    "cholesky": (torch.linalg.cholesky, INDEFINITE),
    "inv": (torch.linalg.inv, SINGULAR),
    "solve": (lambda w: torch.linalg.solve(w, torch.ones(2, dtype=w.dtype)), SINGULAR),
    "batched": (lambda w: torch.linalg.cholesky(torch.stack([w, w])), INDEFINITE),
}


class _Matrix(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor], values: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.weight * x.mean()).sum()


def _job(call: Callable[[Tensor], Tensor], values: list[list[float]]) -> piper.Job:
    program = piper.trace(lambda: _Matrix(call, values), BATCH, lambda m, b: m(b))
    return program.lower(optimizer=piper.sgd(lr=0.1))


@pytest.mark.parametrize("name", CALLS)
def test_no_finite_numbers_where_torch_raises(name: str) -> None:
    call, values = CALLS[name]
    with pytest.raises(torch.linalg.LinAlgError):
        call(torch.tensor(values))
    with _job(call, values).launch("loopback") as run:
        assert math.isnan(run.evaluate(BATCH).loss)
        assert math.isnan(run.step(BATCH).loss)
        assert run.gradients()["weight"].isnan().any()


@pytest.mark.parametrize("name", CALLS)
def test_matrices_that_torch_takes_train_as_on_one_device(name: str) -> None:
    job = _job(CALLS[name][0], GOOD)
    reference = train_one_device(job, [BATCH] * 2)
    with job.launch("loopback") as run:
        assert compare(run, [BATCH] * 2, reference).exact


def test_a_call_that_asks_for_no_check_is_left_alone() -> None:
    with _job(lambda w: torch.linalg.cholesky_ex(w)[0], INDEFINITE).launch("loopback") as run:
        wanted = torch.linalg.cholesky_ex(torch.tensor(INDEFINITE, dtype=torch.float64))[0].sum()
        assert run.step(BATCH).loss == wanted.item()
