"""Metrics as a third result."""

import torch
from _first import Model, batch, step

import piper


def loss(model, batch):
    count = torch.tensor(len(batch["y"]))
    return step(model, batch) * count, count, {"rows": count}


piper.trace(Model, batch(), loss)
