"""A step under no_grad."""

import torch
from _first import Model, batch, step

import piper


def loss(model, batch):
    with torch.no_grad():
        return step(model, batch)


piper.trace(Model, batch(), loss)
