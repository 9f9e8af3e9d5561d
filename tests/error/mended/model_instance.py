"""A model of 70 billion parameters fits into no process. So Piper never wants the model, but the
function that makes it: tracing calls it without memory for weights, and each rank makes the
weights that it holds.

See: [a program of your own](../guide/start.md#a-program-of-your-own), [initial
weights](../guide/model.md#initial-weights)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower()  # the class; or def model(): return Model()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
