"""Scaling keeps gradients of float16 from becoming 0. bfloat16 has the exponents of float32 and
needs none of that.

See: [precision](../guide/precision.md)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(precision="bf16")
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
