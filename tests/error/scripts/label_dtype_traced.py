"""Labels as floating-point numbers."""

import torch
from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


example = {**batch(), "y": torch.zeros(8)}
piper.trace(Model, example, loss)
