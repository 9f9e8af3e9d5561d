"""The code takes another way for small batches."""

import torch
from torch import nn

from piper import Schedule, annotate, where


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = self.first(x)
        if x.shape[0] > 4:
            with annotate("PP"):
                x = self.second(x)
        return x


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def strategy(s: Schedule) -> None:
    s.split(where(), "MB", 4)
