"""A scheduler's class, which takes more than an optimizer."""

from _first import batch, job
from torch.optim.lr_scheduler import StepLR

import piper

piper.train(job(), [batch()], steps=1, launch="loopback", lr_schedule=StepLR)
