"""A batch whose rows do not divide over data ranks and microbatches."""

from _first import batch, job

with job(dp=2, microbatches=2).launch("loopback") as run:
    run.step(batch())
    run.step(batch(6))
