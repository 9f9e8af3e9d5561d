"""A gradient scaler inside of the step."""

import torch
from _first import Model, batch, step

import piper

scaler = torch.amp.GradScaler("cpu")


def loss(model, batch):
    return scaler.scale(step(model, batch))


piper.trace(Model, batch(), loss)
