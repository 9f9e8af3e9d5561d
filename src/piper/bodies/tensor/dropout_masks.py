"""Keyed dropout as a product: captured code in, the same code with masks as operators out.

Tracing before dispatch does not see the draws under a captured call, and a rank must be able to draw
its own part of a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.casts import CASTS
from piper.bodies.random.keyed import keyed
from piper.bodies.tensor import part_ops as part_ops
from piper.errors import TraceError

_KEYED = re.compile(r"keyed_(\d+)_(\w+)")


def with_masks(graph: fx.Graph) -> fx.Graph:
    """A copy of the code; raises TraceError where something other than dropout draws."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        name = _KEYED.fullmatch(getattr(node.target, "__qualname__", ""))
        if node.op != "call_function" or name is None:
            copies[node] = copy.node_copy(node, copies.__getitem__)
            continue
        position = int(name[1])
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = copy.call_function(
            _masked(node, position, callee=name[2]), (position, *args), kwargs
        )
        # Its casts would be those of the operators inside.
        copies[node].meta = {key: value for key, value in node.meta.items() if key != CASTS}
    return copy


def _masked(node: fx.Node, position: int, *, callee: str) -> Callable[..., Tensor]:
    """What stands for a keyed call."""
    for operation, function in _MASKED.items():
        if node.target is keyed(operation, position):
            return function
    raise TraceError(
        f"{callee} draws random numbers ({source_of(node)}), of which a rank cannot draw its part",
        legal="torch.nn.functional.dropout and scaled_dot_product_attention in code that is cut over "
        "ranks",
    )


def _dropout(
    position: int,
    keys: Tensor,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if inplace:
        raise TraceError(
            "dropout in place, in code that is cut over ranks", legal="dropout(inplace=False)"
        )
    return _dropped(input, keys, position, p) if training and p > 0 else input


def _dropped(x: Tensor, keys: Tensor, position: int, p: float) -> Tensor:
    # Detached, for the mask reads nothing but a shape.
    mask = torch.ops.piper.keyed_mask(x.detach(), keys, position, 1.0 - p)
    return x * mask * (1.0 / (1.0 - p) if p < 1 else 0.0)


def _attention(
    position: int,
    keys: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch computes attention without a fused kernel: a keyed call never has one."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    root = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return _dropped(weights, keys, position, dropout_p) @ value


_MASKED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
