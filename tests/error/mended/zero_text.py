"""Levels of ZeRO are numbers, as the degrees are. Text comes from a configuration file or an
environment variable: make an int of it.

See: [ZeRO](../guide/memory.md#zero), [replicate](../directives/replicate.md)
"""

from _first import Model, batch, step

import piper

strategy = piper.strategies.parallel(dp=2, zero=3)
job = piper.trace(Model, batch(), step).apply(strategy).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
