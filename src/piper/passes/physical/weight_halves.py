"""weight_halves: where communication follows a backward, gradients of weights are computed beside it.

A backward of code that is cut over ranks often hands its input's gradient to a collective, for which the
backward before waits. So do a backward of experts, and that of the code behind them: their gradients
travel as rows do. Halves let that start first: BI, then the communication beside BW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from piper.directives.halves import split_backwards
from piper.ir.graph import Graph, OrderEdge
from piper.ir.layouts import Routed, change_between, dual
from piper.ir.nodes import TRACED, Chunk, Comm, Node
from piper.ir.values import Value, made_for
from piper.passes.physical.draft import Draft

_NO_COMMUNICATION = ("", "own_part")


def weights_beside(logical: Graph) -> Graph:
    """A complete logical graph with halves of all backwards that make gradients of matrices and hand
    on a gradient that is communicated along an axis that shares tensors or experts. Orders still find
    both as B."""

    def wanted(node: Chunk) -> bool:
        values = [logical.values[name] for name in node.outputs]
        if not any(v.role == "param_grad" and len(v.shape) > 1 for v in values):
            return False
        gradients = [value for value in values if value.role == "grad"]
        cut = node.piece_of >= 0
        return any(_routed(logical, v) or (cut and _communicates(logical, v)) for v in gradients)

    return split_backwards(logical, wanted, serves="B")


def _routed(logical: Graph, gradient: Value) -> bool:
    """Whether a gradient goes to experts, or comes from them."""
    pair = (gradient, logical.values[gradient.of])
    return any(isinstance(layout, Routed) for value in pair for _, layout in value.layout)


def _communicates(logical: Graph, gradient: Value) -> bool:
    """Whether a gradient is communicated to where the Value lies that it is the gradient of."""
    read = logical.values[gradient.of]
    if not read.source:
        return False
    made = logical.values[read.source]
    back = msgspec.structs.replace(made, layout=tuple((axis, dual(way)) for axis, way in made.cut))
    given = msgspec.structs.replace(read, layout=tuple((axis, dual(way)) for axis, way in read.cut))
    change, _ = change_between(made_for(given, back), back.layout, logical.mesh)
    return change not in _NO_COMMUNICATION


def hold_weights(draft: Draft) -> None:
    """Have each such BW run before the chunks that wait for the communication beside it."""
    readers: dict[str, list[str]] = defaultdict(list)
    halves = [n for n in draft.nodes.values() if isinstance(n, Chunk) and n.phase == "BW"]
    halves = [node for node in halves if node.serves]
    for node in draft.nodes.values() if halves else ():
        for name in dict.fromkeys(node.inputs):
            readers[name].append(node.name)
    for node in halves:
        first = draft.nodes.get(f"BI{node.name.removeprefix('BW')}")
        for waiting in _waiting(draft, first, readers) if isinstance(first, Chunk) else ():
            draft.edges.append(OrderEdge(node.name, waiting, TRACED))


def _waiting(draft: Draft, chunk: Chunk, readers: Mapping[str, list[str]]) -> list[str]:
    """Chunks on its slice that wait for communication of what a chunk makes."""
    found: dict[str, None] = {}
    stack = [(name, False) for name in chunk.outputs]
    seen = set(stack)
    while stack:
        value, communicated = stack.pop()
        for name in readers.get(value, ()):
            node = draft.nodes[name]
            if node.slice != chunk.slice:
                continue
            if isinstance(node, Chunk):
                if communicated:
                    found[name] = None
                continue
            fresh = [(each, communicated or _beside(draft, node)) for each in node.outputs]
            stack += [each for each in fresh if each not in seen]
            seen.update(fresh)
    return list(found)


def _beside(draft: Draft, node: Node) -> bool:
    """Whether it is communication that gradients of weights are computed beside."""
    if not isinstance(node, Comm):
        return False
    return node.comm == "all_to_all" or bool(draft.values[node.inputs[0]].cut)
