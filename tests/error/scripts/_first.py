"""A first program: a model of two stages, a batch and a step. What the mistakes here start from."""

import torch
from torch import nn

import piper


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = torch.relu(self.first(x))
        with piper.annotate("PP"):
            return self.second(x)


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 6), "y": torch.zeros(rows, dtype=torch.int64)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job(**degrees: int) -> piper.Job:
    return piper.trace(Model, batch(), step).apply(piper.strategies.parallel(**degrees)).lower()
