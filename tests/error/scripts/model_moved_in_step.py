"""The model moved to a device that the file chose."""

import torch
from _first import Model, batch, step

import piper

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loss(model, batch):
    return step(model.to(device), batch)


piper.trace(Model, batch(), loss)
