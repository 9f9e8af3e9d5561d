"""Once one region has a place, all need one: Piper does not guess where the others run.

See: [place](../directives/place.md)
"""

from _model import batch, model, step

import piper
from piper import Schedule, where


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP=1), mesh.at(pp=1))


job = piper.trace(model, batch(), step).apply(strategy).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
