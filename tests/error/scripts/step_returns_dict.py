"""A step that returns a dictionary."""

from _first import Model, batch, step

import piper


def loss(model, batch):
    return {"loss": step(model, batch)}


piper.trace(Model, batch(), loss)
