"""Stages that are to lie together, and one that is left out."""

import torch
from torch import nn

from piper import Schedule


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def strategy(s: Schedule) -> None:
    s.mesh(pp=2)
    s.cut("PP", 2, together=((0,),))
