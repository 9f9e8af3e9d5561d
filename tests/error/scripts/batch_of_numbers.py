"""A batch that has no tensors."""

from _first import Model, step

import piper

piper.trace(Model, {"x": [1, 2, 3]}, step)
