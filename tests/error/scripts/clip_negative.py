"""A norm below 0."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).lower(clip=-1.0)
