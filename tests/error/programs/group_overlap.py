"""A parameter in two groups of one optimizer."""

import torch
from _model import batch, model, step  # noqa: F401


def optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": params}, {"params": params[:1], "lr": 0.5}])
