"""A step that returns what nanoGPT's forward does: (logits, loss)."""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    logits = model(batch["x"])
    return logits, nn.functional.cross_entropy(logits, batch["y"])


piper.trace(Model, batch(), loss)
