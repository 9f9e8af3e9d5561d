"""A tensor that is not the model's would never be trained."""

import torch
from _model import batch, model, step  # noqa: F401

TEMPERATURE = torch.nn.Parameter(torch.ones(1))


def optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*params, TEMPERATURE])
