"""Operators that a user's file registers, by `custom_op` and by `define`; workers must import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("own::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2.0 * x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _twice_backward(context: Any, grad: Tensor) -> Tensor:
    return twice(grad)


twice.register_autograd(_twice_backward)

torch.library.define("own::thrice", "(Tensor x) -> Tensor")


@torch.library.impl("own::thrice", "CompositeExplicitAutograd")
def _thrice(x: Tensor) -> Tensor:
    return 3.0 * x


@torch.library.register_fake("own::thrice")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _thrice_backward(context: Any, grad: Tensor) -> Tensor:
    return torch.ops.own.thrice(grad)


torch.library.register_autograd("own::thrice", _thrice_backward)
