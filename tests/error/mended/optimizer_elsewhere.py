"""The function gets the parameters to step. Those of another model, made in the file, are not the
ones that ranks train, even if both models are of one class.

See: [optimizers](../guide/optimizers.md)
"""

import torch
from _first import Model, batch, step

import piper


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)


job = piper.trace(Model, batch(), step).lower(optimizer=optimizer)
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
