"""A step that calls backward itself."""

from _first import Model, batch, step

import piper


def loss(model, batch):
    found = step(model, batch)
    found.backward()
    return found


piper.trace(Model, batch(), loss)
