"""A model whose class takes arguments."""

from _first import Model, batch, step

import piper


class Wide(Model):
    def __init__(self, width):
        super().__init__()
        self.width = width


piper.trace(Wide, batch(), step)
