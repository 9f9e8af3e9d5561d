"""A precision says more than one dtype: in which one computes, sums, reduces and steps. The names of
those that come with Piper are short.

See: [precision](../guide/precision.md)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(precision="bf16")
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
