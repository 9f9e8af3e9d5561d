"""A model that DistributedDataParallel wraps already."""

from _first import Model, batch, step
from torch.nn.parallel import DistributedDataParallel as DDP

import piper

piper.trace(lambda: DDP(Model()), batch(), step)
