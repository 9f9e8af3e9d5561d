"""Gradients are averaged over microbatches and data ranks. For that Piper has to know what a loss is
the mean of: return the mean, or the sum with the number of its terms.

See: [losses](../guide/model.md#loss)
"""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    rows = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return rows.sum(), (batch["y"] >= 0).sum()  # or rows.mean()


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
