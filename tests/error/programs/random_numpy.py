"""The model is made with a number that is drawn only where a rank makes its weights."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = float(self.layer.weight.detach().numpy().std())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.scale


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
