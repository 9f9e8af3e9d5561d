"""An embedding whose gradient would be sparse."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6, dtype=torch.int64)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
