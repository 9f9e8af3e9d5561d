"""A precision that there is not."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).lower(precision="bfloat16")
