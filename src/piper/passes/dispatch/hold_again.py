"""hold_again: what runs again for a backward does not before the gradient arrives, unless an order says
when backwards run; then it comes right before them, and does not wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from piper.ir.communication import communication
from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import TRACED, Chunk, Comm, Tags
from piper.ir.order.sorting import rewired

_GRADIENTS = ("grad", "sum")


def hold_again(graph: Graph) -> Graph:
    """The graph with the edges that this takes."""
    ordered = {edge.after for edge in graph.edges if edge.origin != TRACED}
    again: dict[tuple[int, Tags], list[Chunk]] = defaultdict(list)
    for node in graph.chunks:
        if node.phase == "R" and node.name not in ordered:
            again[node.piece_of, node.tags].append(node)
    edges = [
        OrderEdge(receive, each.name, TRACED)
        for node in (graph.chunks if again else ())
        if node.phase in ("B", "BI", "BW") and (node.piece_of, node.tags) in again
        for receive in _receives(graph, node)
        for each in again[node.piece_of, node.tags]
    ]
    return rewired(graph, edges=(*graph.edges, *dict.fromkeys(edges))) if edges else graph


def _receives(graph: Graph, backward: Chunk) -> Iterator[str]:
    """What brings gradients from other slices to a backward."""
    stack = [name for name in backward.inputs if graph.values[name].role in _GRADIENTS]
    seen = set(stack)
    while stack:
        for name in graph.producers.get(stack.pop(), ()):
            node = graph.nodes[name]
            if isinstance(node, Chunk) or node.slice != backward.slice:
                continue
            if isinstance(node, Comm) and not communication(node.comm).brings:
                yield name
                continue
            stack += [value for value in node.inputs if value not in seen]
            seen.update(node.inputs)
