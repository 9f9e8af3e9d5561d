"""A step without a return."""

from _first import Model, batch, step

import piper


def loss(model, batch):
    step(model, batch)


piper.trace(Model, batch(), loss)
