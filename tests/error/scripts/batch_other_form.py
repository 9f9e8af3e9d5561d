"""Another form of batch than the example."""

from _first import batch, job

with job().launch("loopback") as run:
    run.step((batch()["x"], batch()["y"]))
