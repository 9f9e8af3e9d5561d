"""A branch on what a tensor holds."""

from _first import Model, batch, step

import piper


def loss(model, batch):
    found = step(model, batch)
    if found > 3:
        found = found * 0.5
    return found


piper.trace(Model, batch(), loss)
