"""A strategy that does not take s."""

from _first import Model, batch, step

import piper


def strategy():
    return piper.strategies.parallel(dp=2)


piper.trace(Model, batch(), step).apply(strategy)
