"""A function of the model, whose argument has another name."""

import torch
from _first import Model, batch, step

import piper

piper.trace(Model, batch(), step).lower(optimizer=lambda m: torch.optim.AdamW(m.parameters()))
