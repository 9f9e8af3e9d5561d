"""A tensor of the batch that all samples share."""

import torch
from _first import Model, batch, step

import piper

piper.trace(Model, {**batch(), "positions": torch.arange(6)}, step)
