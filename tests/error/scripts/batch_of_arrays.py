"""A batch of numpy's arrays."""

from _first import Model, batch, step

import piper

piper.trace(Model, {name: leaf.numpy() for name, leaf in batch().items()}, step)
