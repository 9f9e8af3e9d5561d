"""A step that returns three things."""

from _first import Model, batch

import piper


def loss(model, batch):
    logits = model(batch["x"])
    return logits.mean(), logits.max(), logits.min()


piper.trace(Model, batch(), loss)
