"""A checkpoint that is named by its number."""

from _first import batch, job

with job(dp=2).launch("loopback") as run:
    run.step(batch())
    run.save(1)
