"""A schedule that there is not."""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
program.apply(piper.strategies.parallel(pp=2, schedule="1f1b1", microbatches=2))
