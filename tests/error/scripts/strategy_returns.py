"""A strategy that returns a strategy."""

from _first import Model, batch, step

import piper


def strategy(s):
    return piper.strategies.parallel(dp=2)


piper.trace(Model, batch(), step).apply(strategy)
