"""A dataset has samples, and a step takes batches. A DataLoader makes batches of samples; its
`batch_size` is that of the global batch, over all data ranks.

See: [data](../data.md)
"""

import torch
from _first import job
from torch.utils.data import DataLoader

import piper

samples = [{"x": torch.ones(6), "y": torch.tensor(0)} for _ in range(32)]
loader = DataLoader(samples, batch_size=8)
training = piper.train(job(), loader, steps=1, launch="loopback")
print(training.losses[-1])
