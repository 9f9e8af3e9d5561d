"""The user's own code raises."""

import torch
from torch import nn


def model() -> nn.Module:
    raise KeyError("width")


def batch() -> torch.Tensor:
    return torch.ones(8, 6)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()
