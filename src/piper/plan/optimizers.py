"""Optimizers by name: what a plan can say of an optimizer without holding one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from piper.plan.types import Optimizer

SCALAR_BYTES = 4  # torch counts steps in float32


def sgd(lr: float, **options: Any) -> Optimizer:
    """`torch.optim.SGD` with these arguments."""
    return Optimizer("SGD", {"lr": lr, **options})


def adamw(lr: float = 1e-3, **options: Any) -> Optimizer:
    """`torch.optim.AdamW` with these arguments."""
    return Optimizer("AdamW", {"lr": lr, **options})


# Per class of torch.optim that treats every element alone: for a parameter, how many tensors of its
# shape and how many numbers it keeps from step to step.
_STATE: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {
    "ASGD": lambda o: (1, 3),
    "Adadelta": lambda o: (2, 1),
    "Adagrad": lambda o: (1, 1),
    "Adam": lambda o: (2 + bool(o.get("amsgrad")), 1),
    "AdamW": lambda o: (2 + bool(o.get("amsgrad")), 1),
    "Adamax": lambda o: (2, 1),
    "NAdam": lambda o: (2, 2),
    "RAdam": lambda o: (2, 1),
    "RMSprop": lambda o: (1 + bool(o.get("momentum")) + bool(o.get("centered")), 1),
    "Rprop": lambda o: (2, 1),
    "SGD": lambda o: (int(bool(o.get("momentum"))), 0),
}
# Those that look at a whole tensor, and at what of it.
WHOLE = {
    "Adafactor": "averages over rows, columns and all of a parameter",
    "Muon": "orthogonalises the whole matrix of a parameter",
}
KNOWN = (*_STATE, *WHOLE)


def state_size(optimizer: Optimizer, shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements of the parameter's dtype, and plain numbers, that are kept for a parameter."""
    size = math.prod(shape)
    if optimizer.name == "Muon":
        return size, 0
    if optimizer.name == "Adafactor":
        factored = math.prod(shape[:-1]) + math.prod((*shape[:-2], *shape[-1:]))
        return (factored if len(shape) > 1 else size), 1
    tensors, numbers = _STATE[optimizer.name](optimizer.options)
    return tensors * size, numbers
