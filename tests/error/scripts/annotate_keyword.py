"""Annotate with a keyword, as tag takes it."""

from _first import Model, batch, step

import piper


class Tagged(Model):
    def forward(self, x):
        with piper.annotate(PP=0):
            x = self.first(x)
        return self.second(x)


piper.trace(Tagged, batch(), step)
