"""Optimizers by name: what a plan can say of an optimizer without holding one."""

from __future__ import annotations

from typing import Any

from piper.plan.types import Optimizer


def sgd(lr: float, **options: Any) -> Optimizer:
    """`torch.optim.SGD` with these arguments."""
    return Optimizer("SGD", {"lr": lr, **options})


def adamw(lr: float = 1e-3, **options: Any) -> Optimizer:
    """`torch.optim.AdamW` with these arguments."""
    return Optimizer("AdamW", {"lr": lr, **options})
