"""An assert on what a loss is."""

import torch
from _first import Model, batch, step

import piper


def loss(model, batch):
    found = step(model, batch)
    assert not torch.isnan(found)
    return found


piper.trace(Model, batch(), loss)
