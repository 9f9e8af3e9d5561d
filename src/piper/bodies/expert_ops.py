"""Operators of our own: products of rows with one matrix per group.

`torch.nn.functional.grouped_mm` traces in bf16 only and its backward refuses expanded tangents (torch
2.11 and 2.13), so models that must also train in float32 and float64 use these. On CUDA in bf16 all
groups are one kernel, and the host never waits for the counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MAX_GROUPS = 1023  # of torch's kernel
_ALIGNED = 8  # elements of bf16 in 16 bytes


@torch.library.custom_op("piper::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of `x` [N, k], sorted by group, times `weight` [E, k, n]; group e has `counts[e]` rows."""
    if has_kernel(x, weight.shape[2], counts):
        return in_one_kernel(x, weight, counts)
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
    if has_kernel(x, grad.shape[1], counts):
        return weight_in_one_kernel(x, grad, counts)
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
    if weight.stride(1) == 1:  # the transpose of a parameter, whose gradient then needs no copy
        return back, grouped_mm_weight(grad, x, counts).transpose(1, 2), None
    return back, grouped_mm_weight(x, grad, counts), None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_inputs)


def has_kernel(x: Tensor, columns: int, counts: Tensor) -> bool:
    """Whether torch's kernel multiplies rows like these by matrices of so many columns."""
    aligned = x.shape[1] % _ALIGNED == 0 and columns % _ALIGNED == 0
    fits = aligned and counts.shape[0] <= _MAX_GROUPS and x.shape[0] > 0
    return x.is_cuda and x.dtype == torch.bfloat16 and fits


def in_one_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_mm` where `has_kernel`."""
    return torch._grouped_mm(_as_taken(x), _as_taken(weight), offs=_ends(counts))


def weight_in_one_kernel(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """`grouped_mm_weight` where `has_kernel`.

    A group without rows is legal only with dense columns on the left and dense rows on the right. What
    the kernel then writes is zeros on Hopper, but not on Blackwell (NVIDIA/cutlass#2674,
    pytorch/pytorch#172439); once all kernels do, the last line can go.
    """
    out = torch._grouped_mm(_as_taken(x).t(), _as_taken(grad), offs=_ends(counts))
    return out.masked_fill_((counts == 0).view(-1, 1, 1), 0)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _as_taken(tensor: Tensor) -> Tensor:
    """A tensor as the kernel takes it, else a copy: dense rows (or, of weights, dense columns), of
    which each starts at a multiple of 16 bytes."""
    lines = tensor.mT if tensor.dim() == 3 and tensor.stride(1) == 1 else tensor
    *outer, dense = lines.stride()
    starts = (*outer, tensor.storage_offset())  # a storage itself is aligned
    if dense == 1 and outer[-1] >= lines.shape[-1] and not any(s % _ALIGNED for s in starts):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
