"""Autocast in a captured graph in; the same graph without it, whose nodes know their casts, out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from piper.bodies.casts import CASTS, Casts, DeviceCasts

_OF_CPU = (torch.bfloat16, torch.float16)  # with another dtype, torch warns and casts nothing


def mark_casts(graph: fx.Graph) -> None:
    """Exchange the nodes that begin and end an autocast for a mark on each node between them."""
    before: dict[fx.Node, Casts | None] = {}  # per begin, what was there
    casts: Casts | None = None
    contexts = itertools.count()
    begins: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is torch.amp.autocast_mode._exit_autocast:
            casts = before[node.args[0]]
            graph.erase_node(node)
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            before[node] = casts
            casts = _inside(casts or Casts((), True, next(contexts)), *node.args)
            begins.append(node)
        elif casts is not None and node.op.startswith("call"):
            node.meta[CASTS] = casts
    for node in reversed(begins):
        graph.erase_node(node)


def _inside(
    outer: Casts,
    device: str,
    dtype: torch.dtype | None = None,
    enabled: Any = True,
    cached: Any = None,
) -> Casts:
    dtype = dtype or torch.get_autocast_dtype(device)
    enabled = bool(enabled) and (device != "cpu" or dtype in _OF_CPU)
    others = tuple(casts for casts in outer.devices if casts.device != device)
    return replace(
        outer,
        devices=(*others, DeviceCasts(device, dtype, enabled)),
        cached=outer.cached if cached is None else bool(cached),
    )
