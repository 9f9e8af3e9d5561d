"""Piper makes the optimizer on the ranks, of the parameters or shards that each holds, and steps it
once all gradients are there. `lower` is told which one.

See: [optimizers](../guide/optimizers.md)
"""

from functools import partial

import torch
from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(optimizer=partial(torch.optim.SGD, lr=0.1))
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
