"""A mesh has an axis `dp`, and no directive says what its ranks share: the batch, experts or
tensors. `replicate` is what data parallelism is called.

See: [replicate](../directives/replicate.md), [mesh](../directives/mesh.md)
"""

from _model import batch, model, step

import piper
from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2, dp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.replicate(where(), over="dp")


job = piper.trace(model, batch(), step).apply(strategy).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
