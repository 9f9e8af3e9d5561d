"""An optimizer of torch in place of a function that makes one."""

import torch
from _first import Model, batch, step

import piper

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
piper.trace(Model, batch(), step).lower(optimizer=optimizer)
