"""`lower` gives your function a list of the parameters, as torch's optimizers take it. A function whose
argument is called `model`, or annotated as an `nn.Module`, gets the model: for groups by name, say.

See: [optimizers](../guide/optimizers.md)
"""

import torch
from _first import Model, batch, step

import piper


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


job = piper.trace(Model, batch(), step).lower(optimizer=optimizer)
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
