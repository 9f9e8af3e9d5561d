"""A batch that does not fit the first layer."""

import torch
from _first import Model, step

import piper


class Narrow(Model):
    def forward(self, x):
        return self.second(self.first(x))


piper.trace(Narrow, {"x": torch.ones(8, 5), "y": torch.zeros(8).long()}, step)
