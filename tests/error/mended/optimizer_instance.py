"""An optimizer of torch holds the tensors that it was made of, in your process. Ranks hold others:
under ZeRO only shards. So `lower` takes the function, and each rank calls it.

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
