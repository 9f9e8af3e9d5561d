"""A program in place of a job."""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
piper.train(program, [batch()], steps=1, launch="loopback")
