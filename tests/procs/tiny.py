"""A FILE for `piper train` that compiles quickly; with BROKEN set, one data rank cannot read on."""

import os
from collections.abc import Iterator

import torch
from torch import nn

import piper

ROWS = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def model() -> nn.Module:
    return Model()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(seed % 2))


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 0.5).square().mean()


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def lr_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    for number in range(100_000):
        if "BROKEN" in os.environ and share.rank == 1 and number == 2:
            raise OSError("block 7 is damaged")
        yield batch(number)[share.rows(ROWS)]


def validation(share: piper.Share) -> list[torch.Tensor]:
    return [batch(number)[share.rows(ROWS)] for number in range(2)]
