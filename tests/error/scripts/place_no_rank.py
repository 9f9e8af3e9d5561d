"""A rank that the mesh does not have."""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    mesh = s.mesh(pp=2)
    s.place(where(PP=0), mesh.at(pp=0))
    s.place(where(PP=1), mesh.at(pp=2))


piper.trace(Model, batch(), step).apply(strategy)
