"""An optimizer of the parameters of another model."""

import torch
from _first import Model, batch, step

import piper

model = Model()


def optimizer(params):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


piper.trace(Model, batch(), step).lower(optimizer=optimizer)
