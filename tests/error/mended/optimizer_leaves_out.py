"""A function decides which parameters are trained: one that it gives to no optimizer stays as it
was made. That is legal, so Piper warns, and names them. Here biases were to have no weight decay,
and got no optimizer. `requires_grad_(False)` in the function says that a parameter is left out on
purpose, and the warning is gone.

See: [optimizers](../guide/optimizers.md)
"""

import torch
from _first import Model, batch, step

import piper


def decayed(params):
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


job = piper.trace(Model, batch(), step).lower(optimizer=decayed)
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
