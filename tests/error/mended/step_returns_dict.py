"""A step returns its loss first, and what else is of interest behind it, by name. Metrics are
averaged like losses.

See: [metrics](../guide/model.md#metrics)
"""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    logits = model(batch["x"])
    right = (logits.argmax(-1) == batch["y"]).float().mean()
    return nn.functional.cross_entropy(logits, batch["y"]), {"accuracy": right}


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
