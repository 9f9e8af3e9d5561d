"""A program becomes a job by `lower`, and a job launches. In between the plan is made and proved, so
that a program that runs is one that ends.

See: [three objects](../guide/start.md#a-program-of-your-own)
"""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
with program.lower().launch("loopback") as run:
    print(run.step(batch()).loss)
