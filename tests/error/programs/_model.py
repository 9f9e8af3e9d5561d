"""Two stages; the second has experts. What most of the wrong programs here start from."""

import torch
from torch import nn

import piper


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, 6))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return piper.grouped_mm(rows, self.weight, counts)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            x = self.second(x)
            counts = torch.zeros(4, dtype=torch.int64)
            counts = counts.scatter_add(0, x.argmax(-1) % 4, torch.ones(len(x)).long())
            with piper.annotate("EP"):
                x = self.experts(x, counts)
        return x


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
