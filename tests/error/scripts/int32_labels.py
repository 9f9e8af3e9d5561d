"""Labels in int32."""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


example = batch()
piper.trace(Model, {**example, "y": example["y"].int()}, loss)
