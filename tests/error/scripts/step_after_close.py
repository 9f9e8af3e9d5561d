"""A step after the run was closed."""

from _first import batch, job

with job().launch("loopback") as run:
    run.step(batch())
run.step(batch())
