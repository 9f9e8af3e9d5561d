"""An optimizer by name."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).lower(optimizer="adamw")
