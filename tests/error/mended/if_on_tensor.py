"""A plan is made before there is data, so no branch can depend on a value. `torch.where` computes
both sides and chooses, row by row if need be.

See: [what your model and step may do](../guide/model.md), [errors of
tracing](../errors.md#traceerror)
"""

import torch
from _first import Model, batch, step

import piper


def loss(model, batch):
    found = step(model, batch)
    return torch.where(found > 3, found * 0.5, found)


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
