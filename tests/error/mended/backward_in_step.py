"""`step` is the forward alone. Piper derives the backward from it and cuts it as the strategy wants,
so that the backward of one stage can run beside the forward of another.

See: [how Piper works](../architecture.md#bodies-code-that-travels)
"""

from _first import Model, batch, step

import piper


def loss(model, batch):
    return step(model, batch)


job = piper.trace(Model, batch(), loss).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
