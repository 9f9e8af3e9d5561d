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


@torch.library.custom_op("own::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("own::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad * weight, (grad * x).sum(0)


@scaled_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _scaled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return scaled_backward(grad, *ctx.saved_tensors)


scaled.register_autograd(_scaled_gradients, setup_context=_keep)
