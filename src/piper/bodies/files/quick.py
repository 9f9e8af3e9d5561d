"""quick: a body's graph as it was shipped in; the same operators, called by their shortest way, out.

A shipped body calls every operator by its overload, for which torch boxes the arguments. Its Python
functions reach the same kernels in half the time, and some views need no call at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


def seed_host(seed: int) -> None:
    """Initial values are drawn on the CPU; torch's own seeds every kind of device, and remembers the
    stack for those that are not there."""
    torch.default_generator.manual_seed(seed)


_FUNCTIONS: dict[Any, Any] = {
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.cat.default: torch.cat,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.exp.default: torch.exp,
    _aten.relu.default: torch.relu,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.silu.default: torch._C._nn.silu,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    torch.random.manual_seed: seed_host,
}
_METHODS = {
    _aten.view.default: "view",
    _aten._unsafe_view.default: "view",
    _aten.expand.default: "expand",
}


def quicken(graph: fx.Graph) -> None:
    """Change a graph in place. Its results are the same bits, in the same layout."""
    for node in list(graph.nodes):
        same = _same(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.op == "call_function" and not node.kwargs and not _numbers(node):
            if node.target in _METHODS:
                node.op, node.target = "call_method", _METHODS[node.target]
            else:
                node.target = _FUNCTIONS.get(node.target, node.target)
    for node in reversed(list(graph.nodes)):  # what only a view that is gone has read
        if node.target is torch.t and not node.users:
            graph.erase_node(node)


def _same(node: fx.Node) -> fx.Node | None:
    """What a view shows all of, just as it is."""
    if node.target is _aten.detach.default:
        found = node.args[0]
    elif node.target is _aten.t.default and (turned := _turned(node.args[0])) is not None:
        found = turned.args[0]
    else:
        return None
    return found if isinstance(found, fx.Node) else None


def _turned(value: Any) -> fx.Node | None:
    """The node, if it is a transpose."""
    is_t = isinstance(value, fx.Node) and value.target in (torch.t, _aten.t.default)
    return value if is_t else None


def _numbers(node: fx.Node) -> bool:
    """Whether a number stands where another overload would take it."""
    arithmetic = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
    return node.target in arithmetic and not all(isinstance(a, fx.Node) for a in node.args)
