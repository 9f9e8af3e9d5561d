"""A stage that there is not."""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    mesh = s.mesh(pp=2)
    for stage in range(3):
        s.place(where(PP=stage), mesh.at(pp=stage % 2))


piper.trace(Model, batch(), step).apply(strategy)
