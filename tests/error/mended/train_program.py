"""`lower` is where an optimizer is named and the plan is made; `train` takes what it returns.

See: [training](../guide/training.md)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(optimizer=piper.adamw(lr=1e-3))
training = piper.train(job, [batch()], steps=1, launch="loopback")
print(training.losses[-1])
