"""A mesh axis misspelt."""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    mesh = s.mesh(pp=2, dp=2)
    s.place(where(PP=0), mesh.at(pq=0))


piper.trace(Model, batch(), step).apply(strategy)
