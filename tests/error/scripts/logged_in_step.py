"""A loss that is logged in the step."""

from _first import Model, batch, step
from torch.utils.tensorboard import SummaryWriter

import piper

writer = SummaryWriter.__new__(SummaryWriter)


def loss(model, batch):
    found = step(model, batch)
    writer.add_scalar("loss", found, 0)
    return found


piper.trace(Model, batch(), loss)
