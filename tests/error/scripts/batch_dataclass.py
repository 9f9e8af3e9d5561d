"""A batch as a dataclass."""

from dataclasses import dataclass

import torch
from _first import Model, batch
from torch import nn

import piper


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch.x), batch.y)


piper.trace(Model, Batch(**batch()), loss)
