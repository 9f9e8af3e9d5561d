"""A step that steps an optimizer."""

import torch
from _first import Model, batch, step

import piper

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model, batch):
    found = step(model, batch)
    optimizer.zero_grad()
    optimizer.step()
    return found


piper.trace(Model, batch(), loss)
