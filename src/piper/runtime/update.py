"""Updater: one Update's parameters under a `torch.optim` optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from piper.ir.values import accumulation_dtype
from piper.plan.types import Optimizer


class Updater:
    """Steps `params` in place. Low-precision parameters have masters of the gradients' dtype."""

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        self.params = params
        self.masters = [torch.nn.Parameter(_master(param)) for param in params]
        make = getattr(torch.optim, optimizer.name)
        self.optimizer = make(self.masters, **optimizer.options)

    def step(self, grads: list[Tensor], divisor: float | Tensor | None) -> None:
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.div_(divisor) if divisor is not None else grad
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if param.data_ptr() != master.data_ptr():
                param.copy_(master)


def _master(param: Tensor) -> Tensor:
    """The parameter itself where its dtype is wide enough, else a wide copy."""
    name = str(param.dtype).removeprefix("torch.")
    return param.detach().to(getattr(torch, accumulation_dtype(name)))
