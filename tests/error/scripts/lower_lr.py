"""A learning rate without its optimizer."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).lower(lr=1e-3)
