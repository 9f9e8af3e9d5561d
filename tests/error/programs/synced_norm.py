"""Statistics over data ranks."""

import torch
from torch import nn

from piper import Schedule, where


def strategy(s: Schedule) -> None:
    s.mesh(dp=2)
    s.replicate(where(), over="dp")


def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
