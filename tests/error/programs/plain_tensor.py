"""A tensor that is an attribute of a module and no buffer of it: no strategy would place it."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = torch.full((6,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x)


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
