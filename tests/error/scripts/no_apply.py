"""Ranks that no strategy has."""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
program.launch("local")
