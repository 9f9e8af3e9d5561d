"""An optimizer function that returns nothing."""

import torch
from _first import Model, batch, step

import piper


def optimizer(params):
    torch.optim.AdamW(params, lr=1e-3)


piper.trace(Model, batch(), step).lower(optimizer=optimizer)
