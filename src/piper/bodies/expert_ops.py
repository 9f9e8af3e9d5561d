"""Operators of our own: products with one matrix per group of rows, and permutations of rows.

`torch.nn.functional.grouped_mm` traces in bf16 only and its backward refuses expanded tangents (torch
2.11 and 2.13), so models that must also train in float32 and float64 use these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("piper::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of `x` [N, k], sorted by group, times `weight` [E, k, n]; group e has `counts[e]` rows."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # 16 bytes: the kernel's demand
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned:
        return torch._grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for group, rows in enumerate(counts.tolist()):
        torch.mm(x[start : start + rows], weight[group], out=out[start : start + rows])
        start += rows
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("piper::grouped_mm_weight", mutates_args=())
def grouped_mm_weight(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """The gradient of `grouped_mm`'s weight; groups without rows get zeros."""
    out = x.new_empty(counts.shape[0], x.shape[1], grad.shape[1])
    start = 0
    for group, rows in enumerate(counts.tolist()):
        torch.mm(x[start : start + rows].t(), grad[start : start + rows], out=out[group])
        start += rows
    return out


@grouped_mm_weight.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], grad.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, counts = ctx.saved_tensors
    grad = grad.contiguous()
    back = grouped_mm(grad, weight.transpose(1, 2), counts)
    return back, grouped_mm_weight(x, grad, counts), None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_inputs)


@torch.library.custom_op("piper::permute_rows", mutates_args=())
def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Row i of the result is row `order[i]` of `x`; `inverse` undoes it, for the gradient."""
    return x.index_select(0, order)


@permute_rows.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_orders(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return permute_rows(grad, inverse, order), None, None


permute_rows.register_autograd(_permute_rows_backward, setup_context=_save_orders)
