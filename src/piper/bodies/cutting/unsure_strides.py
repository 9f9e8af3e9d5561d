"""Strides that fake tensors may have wrong: a view that relies on them is a reshape.

Element-wise kernels keep the order of their arguments' dims, and torch's fake ones do not always say
so (softplus_backward, torch 2.13). On a dense result a view then fails where a reshape copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.cutting.partition import is_view

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_DENSE = {
    "mm", "bmm", "addmm", "baddbmm", "grouped_mm", "index_select", "put_rows", "take_rows",
}  # fmt: skip


def reshape_where_unsure(graph: fx.Graph) -> None:
    """Change the graph's views of results whose strides follow from permuted arguments."""
    unsure: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if is_view(node) or node.target in _VIEWS:
            if inputs[0] in unsure:
                unsure.add(node)
                if node.target in _VIEWS:
                    node.target = _aten.reshape.default
        elif _name(node.target) not in _DENSE and (
            any(n in unsure for n in inputs)
            or (_keeps_order(node.target) and any(map(_permuted, inputs)))
        ):
            unsure.add(node)


def _keeps_order(target: Any) -> bool:
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return pointwise or _name(target).endswith("_backward")


def _name(target: Any) -> str:
    return str(getattr(target, "_opname", ""))


def _permuted(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_contiguous()
