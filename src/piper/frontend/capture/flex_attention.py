"""Flex attention: calls of the operator in, calls of plain math without the blocks of masks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from piper.bodies import flex_math
from piper.frontend.capture.captured_nodes import callee


def lower_flex_attention(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs without those that only said which blocks a kernel may skip."""
    placeholders = graph.find_nodes(op="placeholder")
    blocks: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and callee(node) == "flex_attention":
            *sizes, mask = node.args[4]
            blocks |= {arg for arg in sizes if isinstance(arg, fx.Node)}
            node.target = flex_math.flex_attention
            sizes = [None if arg in blocks else arg for arg in sizes]
            node.args = (*node.args[:4], (*sizes, mask), *node.args[5:])
    unread = {node for node in blocks if node.op == "placeholder" and not node.users}
    for node in unread:
        graph.erase_node(node)
    return [v for node, v in zip(placeholders, inputs, strict=True) if node not in unread]
