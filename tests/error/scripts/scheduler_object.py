"""A scheduler in place of a function that makes it."""

import torch
from _first import Model, batch, job

import piper

optimizer = torch.optim.AdamW(Model().parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
piper.train(job(), [batch()], steps=1, launch="loopback", lr_schedule=schedule)
