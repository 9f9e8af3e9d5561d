"""A table of a schedule names microbatches, so the batch has to be split before. Most directives may
come in any order; those that name what another one makes come after it.

See: [order](../directives/order.md), [pipeline schedules](../schedules.md)
"""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP=1), mesh.at(pp=1))
    s.split(where(), "MB", 4)
    s.order(piper.schedules.one_f_one_b(num_ranks=2, num_microbatches=4))


job = piper.trace(Model, batch(), step).apply(strategy).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
