"""A batch as a list where the step takes a dictionary."""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


example = batch()
piper.trace(Model, [example["x"], example["y"]], loss)
