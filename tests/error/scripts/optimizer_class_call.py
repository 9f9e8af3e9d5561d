"""An optimizer class with its learning rate as if it were called."""

import torch
from _first import Model, batch, step

import piper


def optimizer(params, lr):
    return torch.optim.SGD(params, lr=lr)


piper.trace(Model, batch(), step).lower(optimizer=optimizer)
