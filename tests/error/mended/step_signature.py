"""Piper calls `step(model, batch)` with a model and a batch of its own: those of a microbatch. A
step that makes its batch itself would train on the same rows everywhere.

See: [what your model and step may do](../guide/model.md)
"""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
