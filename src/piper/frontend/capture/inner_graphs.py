"""Inner graphs: a captured graph whose operators take graphs in, one of plain calls alone out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from piper.bodies.captured_nodes import callee, source_of
from piper.bodies.closed_operator import bare, close
from piper.errors import TraceError

_CLOSED = ("autograd_function_apply", "flex_attention")


def inner_graphs(module: nn.Module) -> Iterator[fx.Graph]:
    """The graphs that operators of a captured module take, and those that operators in these take."""
    for child in module.modules():
        if child is not module and isinstance(child, fx.GraphModule):
            yield child.graph


def close_operators(graph: fx.Graph, module: nn.Module) -> dict[str, Tensor]:
    """Close operators over the graphs that they take from `module`; the other attributes, which are
    constants, are returned."""
    constants: dict[str, Tensor] = {}
    inner: dict[fx.Node, fx.GraphModule] = {}
    for node in graph.find_nodes(op="get_attr"):
        value: Any = module
        for word in str(node.target).split("."):
            value = getattr(value, word)
        if isinstance(value, Tensor):
            node.target = str(node.target).replace(".", "_")  # of code in a checkpoint
            constants[node.target] = value
        elif isinstance(value, fx.GraphModule) and all(callee(n) in _CLOSED for n in node.users):
            code = fx.Graph()
            code.output(code.graph_copy(value.graph, {}))
            inner[node] = bare(code, close_operators(code, value))
        else:
            user = next(iter(node.users), node)
            raise TraceError(
                f"{callee(user)} is not supported ({source_of(user)})",
                legal="plain operators and autograd.Function: no control-flow operators",
            )
    for user in [n for n in graph.nodes if any(arg in inner for arg in n.all_input_nodes)]:
        close(graph, user, inner)
    for node in inner:
        graph.erase_node(node)
    return constants
