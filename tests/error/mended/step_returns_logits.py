"""A pair is taken for (sum, count). Training needs the loss alone; what else is to be reported goes
beside it in a dict, as numbers.

See: [losses](../guide/model.md#loss), [metrics](../guide/training.md)
"""

from _first import Model, batch
from torch import nn

import piper


def loss(model, batch):
    logits = model(batch["x"])
    hits = (logits.argmax(-1) == batch["y"]).double().mean()
    return nn.functional.cross_entropy(logits, batch["y"]), {"accuracy": hits}


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).metrics["accuracy"])
