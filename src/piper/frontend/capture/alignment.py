"""Two recordings of a step at two numbers of rows in; which nodes are the same code out."""

from __future__ import annotations

from collections.abc import Hashable
from difflib import SequenceMatcher

from torch import fx


def same_nodes(one: fx.Graph, other: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes, in order, that call the same function in the same module.

    A model may do a little more or less at one number of rows, such as an expand that a single row does
    not need: what follows is still the same code.
    """
    mine, theirs = list(one.nodes), list(other.nodes)
    matcher = SequenceMatcher(None, [*map(_call, mine)], [*map(_call, theirs)], autojunk=False)
    return [
        pair
        for block in matcher.get_matching_blocks()
        for pair in zip(
            mine[block.a : block.a + block.size],
            theirs[block.b : block.b + block.size],
            strict=True,
        )
    ]


def _call(node: fx.Node) -> Hashable:
    modules = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(modules.values())), "")
    return node.op, node.target, path, str(node.meta.get("custom"))
