"""A model of the file in the step, beside the one that the step is given."""

from _first import Model, batch
from torch import nn

import piper

teacher = nn.Linear(6, 3)


def loss(model, batch):
    wanted = nn.functional.linear(batch["x"], teacher.weight)
    return nn.functional.mse_loss(model(batch["x"]), wanted)


piper.trace(Model, batch(), loss)
