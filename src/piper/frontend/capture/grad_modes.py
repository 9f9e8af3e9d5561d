"""Gradient modes in a captured graph in; the same graph without them, with detached inputs, out."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from piper.bodies.captured_nodes import source_of, value_of
from piper.errors import TraceError

_MODES = {
    "_enter_inference_mode": ("inference_mode", "torch.no_grad()"),
}


def remove_grad_modes(graph: fx.Graph) -> None:
    """Code under no_grad leaves detached, so that a cut can fall anywhere."""
    enabled = True
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
            graph.erase_node(node)
        elif getattr(node.target, "__name__", "") in _MODES:
            mode, legal = _MODES[node.target.__name__]
            source = source_of(node)
            raise TraceError(
                f"{mode} is not supported" + (f" ({source})" if source else ""), legal=legal
            )
        elif not enabled and node.op.startswith("call"):
            # Whatever runs without gradient reads, and changes, aliases that have none.
            detached = partial(_detached, graph, before=node)
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), detached)


def _detached(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    if not isinstance(value_of(node), Tensor):
        return node
    with graph.inserting_before(before):
        made = graph.call_method("detach", (node,))
    made.meta = {**before.meta, "example_value": value_of(node).detach()}
    return made
