"""The backward begins at the loss that `step` returns. Without a return there is nothing to
differentiate.

See: [losses](../guide/model.md#loss)
"""

from _first import Model, batch, step

import piper


def loss(model, batch):
    return step(model, batch)


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
