"""The model moved inside of the step."""

from _first import Model, batch, step

import piper


def loss(model, batch):
    model.cuda()
    return step(model, batch)


piper.trace(Model, batch(), loss)
