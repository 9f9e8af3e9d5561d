"""A detached loss has no way back to the parameters. Losses for a log are detached by Piper itself.

See: [losses](../guide/model.md#loss)
"""

from _first import Model, batch, step

import piper


def loss(model, batch):
    return step(model, batch)


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
