"""A model in float16 for a batch in float32."""

from _first import Model, batch, step

import piper


class Half(Model):
    def __init__(self):
        super().__init__()
        self.half()

    def forward(self, x):
        return self.second(self.first(x))


piper.trace(Half, batch(), step)
