"""Products around which nothing else stands: small models, cut over ranks and in strips, are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW

WIDTH, LENGTH, ROWS, WORDS = 8, 8, 4, 16
WAYS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "strips": 2},
    {"tp": 2, "sp": True, "strips": 2, "dp": 2, "zero": 3, "recompute": "nothing"},
]


class Bare(nn.Module):
    """A table, two products and a head: sums of the table's ranks are read by a product, which needs
    gradients of all ranks, and by the residual, which has them already."""

    def __init__(self, between: Callable[[Bare, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.between(self, x))


def residual(model: Bare, x: Tensor) -> Tensor:
    return model.down(F.silu(model.up(x)))


def by_position(model: Bare, x: Tensor) -> Tensor:
    """What tokens are multiplied by is made of nothing that the batch or a parameter says."""
    scale = torch.linspace(0.1, 1.0, LENGTH, device=x.device, dtype=x.dtype)[:, None]
    return model.down(F.silu(model.up(x)) * scale)


def masked(model: Bare, x: Tensor) -> Tensor:
    late = (torch.arange(LENGTH, device=x.device) > 3)[:, None]
    return model.down(F.silu(model.up(x)).masked_fill(late, 0.0))


def of_positions(model: Bare, x: Tensor) -> Tensor:
    """A product whose tokens are made so."""
    places = torch.arange(LENGTH * WIDTH, device=x.device).to(x.dtype).view(LENGTH, WIDTH) / 50
    return model.down(F.silu(model.up(places) + x.repeat(1, 1, 2)))


def of_one_token(model: Bare, x: Tensor) -> Tensor:
    return model.down(F.silu(model.up(model.query)))


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(WORDS, (2, ROWS, LENGTH), generator=generator)
    return {"tokens": tokens, "labels": labels}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("degrees", WAYS, ids=str)
@pytest.mark.parametrize(
    "between", [residual, by_position, masked, of_positions, of_one_token], ids=lambda f: f.__name__
)
def test_trains_like_one_device(
    between: Callable[[Bare, Tensor], Tensor], degrees: dict[str, Any]
) -> None:
    program = piper.trace(lambda: Bare(between).double(), _batch(0), _step)
    job = program.apply(parallel(**degrees)).lower(optimizer=ADAMW)
    batches = [_batch(seed) for seed in range(2)]
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors
