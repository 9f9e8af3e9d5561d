"""A mean that there is not."""

from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step, mean="tokens")
