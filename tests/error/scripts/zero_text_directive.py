"""A level of ZeRO as text, in a directive."""

from _first import Model, batch, step

import piper
from piper import where


def strategy(s):
    s.mesh(dp=2)
    s.replicate(where(), over="dp", zero="3")


piper.trace(Model, batch(), step).apply(strategy)
