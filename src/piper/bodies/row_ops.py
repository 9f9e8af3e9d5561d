"""Operators of our own that sort rows by expert, take them, and put them back.

Each is one node of a graph. None adds by atomics, so that a gradient is the same in every run, and on
CUDA none makes the host wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("piper::sort_experts", mutates_args=())
def sort_experts(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Of the expert of each row [N]: the `order` of rows by expert, equal ones in turn, and `counts`
    [E], how many rows each expert has."""
    ids, order = expert.sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    counts = torch.searchsorted(ids, bounds).diff()
    if not ids.is_cuda and int(counts.sum()) != len(ids):
        raise IndexError(f"rows have chosen experts {ids.unique().tolist()} of {num_experts}")
    return order, counts


@sort_experts.register_fake
def _(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    order = expert.new_empty(expert.shape[0], dtype=torch.int64)
    return order, order.new_empty(num_experts)


@torch.library.custom_op("piper::expert_places", mutates_args=())
def expert_places(received: Tensor, num_rows: int) -> Tensor:
    """Rows came grouped by sender, and a sender's by expert, `received[s, e]` of each: the place of
    each row among all `num_rows` grouped by expert, equal ones in turn."""
    here = received.flatten().cumsum(0).view_as(received)  # where each group of rows ends
    there = received.t().flatten().cumsum(0).view_as(received.t()).t()
    moves = (there - here).flatten()
    moves = torch.repeat_interleave(moves, received.flatten(), output_size=num_rows)
    return moves + torch.arange(num_rows, device=received.device)


@expert_places.register_fake
def _(received: Tensor, num_rows: int) -> Tensor:
    return received.new_empty(num_rows, dtype=torch.int64)


@torch.library.custom_op("piper::take_rows", mutates_args=())
def take_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Each row of `x` so many times, in an order: row i of the result is row `order[i] // copies`.

    `order` is a permutation. A row's gradient is the sum of its copies', always in the same order.
    """
    return x.index_select(0, order if copies == 1 else order // copies)


@take_rows.register_fake
def _(x: Tensor, order: Tensor, copies: int) -> Tensor:
    return x.new_empty(x.shape[0] * copies, *x.shape[1:])


@torch.library.custom_op("piper::put_rows", mutates_args=())
def put_rows(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `take_rows` without copies: row i of `x` is row `order[i]` of the result."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out.index_copy_(0, order, x)


@put_rows.register_fake
def _(x: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.copies = inputs[2]


def _take_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    grad = put_rows(grad, *ctx.saved_tensors)
    if ctx.copies > 1:
        grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
    return grad, None, None


def _save_put(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _put_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return take_rows(grad, *ctx.saved_tensors, 1), None


take_rows.register_autograd(_take_rows_backward, setup_context=_save_take)
put_rows.register_autograd(_put_rows_backward, setup_context=_save_put)
