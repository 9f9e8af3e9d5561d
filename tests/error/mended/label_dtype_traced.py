"""`F.cross_entropy` takes classes as integers. The example batch says which dtypes a program is
compiled for, so it must have those of the data.

See: [batches of other shapes](../guide/model.md#batches-of-other-shapes)
"""

import torch
from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


example = {**batch(), "y": torch.zeros(8, dtype=torch.int64)}
job = piper.trace(Model, example, loss).lower()
with job.launch("loopback") as run:
    print(run.step(example).loss)
