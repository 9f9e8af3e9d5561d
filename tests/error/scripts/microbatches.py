"""Microbatches that do not divide the batch."""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
program.apply(piper.strategies.parallel(dp=2, microbatches=3)).lower()
