"""An optimizer that leaves parameters out."""

import torch
from _first import Model, batch, step

import piper


def decayed(params):
    matrices = [param for param in params if param.ndim > 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}], lr=1e-3)


piper.trace(Model, batch(), step).lower(optimizer=decayed)
