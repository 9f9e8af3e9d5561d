"""A degree as text."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).apply(piper.strategies.parallel(dp="2"))
