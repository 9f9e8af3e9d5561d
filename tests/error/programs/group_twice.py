"""A parameter in two optimizers would be stepped twice."""

import torch
from _model import batch, model, step  # noqa: F401


def optimizer(whole: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in whole.parameters() if p.ndim == 2]
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(whole.parameters())]
