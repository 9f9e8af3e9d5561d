"""Weights that are tied in the step."""

from _first import Model, batch, step
from torch import nn

import piper


class Square(Model):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 6)


def loss(model, batch):
    model.second.weight = model.first.weight
    return step(model, batch)


piper.trace(Square, batch(), loss)
