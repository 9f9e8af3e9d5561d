"""A key that the batch does not have."""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


piper.trace(Model, batch(), loss)
