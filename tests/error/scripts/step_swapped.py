"""A step with its arguments the other way round."""

from _first import Model, batch

import piper


def loss(batch, model):
    return model(batch["x"]).mean()


piper.trace(Model, batch(), loss)
