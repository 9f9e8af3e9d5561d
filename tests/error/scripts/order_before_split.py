"""A schedule before the batch is cut."""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP=1), mesh.at(pp=1))
    s.order(piper.schedules.one_f_one_b(num_ranks=2, num_microbatches=4))
    s.split(where(), "MB", 4)


piper.trace(Model, batch(), step).apply(strategy)
