"""A DataLoader in place of a batch."""

import torch
from _first import Model, step
from torch.utils.data import DataLoader, TensorDataset

import piper

loader = DataLoader(TensorDataset(torch.ones(8, 6), torch.zeros(8).long()), batch_size=4)
piper.trace(Model, loader, step)
