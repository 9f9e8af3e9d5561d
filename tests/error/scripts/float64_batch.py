"""A batch in float64, as numpy makes it, for a model in float32."""

from _first import Model, batch, step

import piper


class Narrow(Model):
    def forward(self, x):
        return self.second(self.first(x))


example = batch()
piper.trace(Narrow, {**example, "x": example["x"].double()}, step)
