"""A name has no learning rate. `piper.adamw` and `piper.sgd` are short forms; a function takes any
optimizer of `torch.optim`.

See: [optimizers](../guide/optimizers.md)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(optimizer=piper.adamw(lr=1e-3))
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
