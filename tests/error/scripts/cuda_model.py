"""A model made on a device."""

from _first import Model, batch, step

import piper

piper.trace(lambda: Model().cuda(), batch(), step)
