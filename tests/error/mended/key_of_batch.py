"""The step is traced on the example batch, so a name that it does not have is found before anything
trains. The error lists the tensors that are there.

See: [a program of your own](../guide/start.md#a-program-of-your-own)
"""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
