"""A group's argument that the optimizer does not know: torch would ignore it."""

import torch
from _model import batch, model, step  # noqa: F401


def optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    norms = [p for p in params if p.ndim < 2]
    rest = [p for p in params if p.ndim >= 2]
    return torch.optim.AdamW([{"params": rest}, {"params": norms, "weight_decy": 0.0}])
