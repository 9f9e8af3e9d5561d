"""Updater: one Update's parameters under a `torch.optim` optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from piper.ir.values import accumulation_dtype
from piper.plan.types import Optimizer


class Updater:
    """Steps `params` in place. Low-precision parameters have masters of the gradients' dtype."""

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        self.masters = [torch.nn.Parameter(_master(param)) for param in params]
        pairs = zip(params, self.masters, strict=True)
        self.narrow = [(p, m.detach()) for p, m in pairs if p.dtype != m.dtype]
        make = getattr(torch.optim, optimizer.name)
        self.optimizer = make(self.masters, **optimizer.options)

    def step(self, grads: list[Tensor], divisor: float | Tensor) -> None:
        """One step with the gradients' sums over their count."""
        if isinstance(divisor, float) and divisor != 1.0:
            torch._foreach_div_(grads, divisor)
        elif isinstance(divisor, Tensor):
            for grad in grads:
                grad.div_(divisor)
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        if self.narrow:
            torch._foreach_copy_([p for p, _ in self.narrow], [m for _, m in self.narrow])


def _master(param: Tensor) -> Tensor:
    """The parameter itself where its dtype is wide enough, else a wide copy."""
    name = str(param.dtype).removeprefix("torch.")
    return param.detach().to(getattr(torch, accumulation_dtype(name)))
