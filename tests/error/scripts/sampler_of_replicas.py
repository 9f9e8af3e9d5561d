"""A DistributedSampler in data of which Piper gives each rank a share."""

import torch
from _first import job
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import piper

samples = TensorDataset(torch.ones(32, 6), torch.zeros(32).long())
sampler = DistributedSampler(samples, num_replicas=2, rank=0)
piper.train(job(dp=2), DataLoader(samples, batch_size=8, sampler=sampler), steps=2)
