"""Gradients clipped in the step, as after a backward."""

from _first import Model, batch, step
from torch.nn.utils import clip_grad_norm_

import piper


def loss(model, batch):
    found = step(model, batch)
    clip_grad_norm_(model.parameters(), 1.0)
    return found


piper.trace(Model, batch(), loss)
