"""A loss that is averaged over ranks by hand."""

import torch.distributed as dist
from _first import Model, batch, step

import piper


def loss(model, batch):
    found = step(model, batch)
    dist.all_reduce(found)
    return found / dist.get_world_size()


piper.trace(Model, batch(), loss)
