"""A device in forward."""

from _first import Model, batch, step

import piper


class Moved(Model):
    def forward(self, x):
        return super().forward(x.cuda())


piper.trace(Moved, batch(), step)
