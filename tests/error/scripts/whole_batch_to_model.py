"""The whole batch for a model that takes x."""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(**batch), batch["y"])


piper.trace(Model, batch(), loss)
