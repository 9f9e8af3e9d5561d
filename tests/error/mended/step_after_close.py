"""A run holds parameters on its ranks, and they end with the block. Save what should outlive it.

See: [checkpoints](../checkpoints.md), [weights out](../weights.md)
"""

from _first import batch, job

with job().launch("loopback") as run:
    run.step(batch())
    print(run.step(batch()).loss)
