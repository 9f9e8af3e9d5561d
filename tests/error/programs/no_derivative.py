"""An operator that has no backward."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.igamma(self.layer(x).abs(), x)


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
