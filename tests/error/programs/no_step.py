"""A file without step()."""

import torch
from torch import nn


def model() -> nn.Module:
    return nn.Linear(6, 6)


def batch() -> torch.Tensor:
    return torch.ones(8, 6)
