"""A step that does not take the batch."""

import torch
from _first import Model, batch

import piper


def loss(model):
    return model(torch.ones(8, 6)).mean()


piper.trace(Model, batch(), loss)
