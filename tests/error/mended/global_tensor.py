"""A plan names all that a rank holds: parameters, buffers, and its part of the batch. A tensor of
the file is none of them, and the worker of another process does not have it. Made in the step, it
is part of the program.

See: [what your model and step may do](../guide/model.md)
"""

import torch
from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    weights = torch.ones(3)
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights)


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
