"""A model in place of a function that makes one."""

from _first import Model, batch, step

import piper

piper.trace(Model(), batch(), step)
