"""in_turn: each microbatch is over before the next one begins, so that one alone keeps what its backward
needs; where that was chosen, to save memory."""

from __future__ import annotations

from collections import defaultdict

from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import Chunk
from piper.ir.order.sorting import rewired


def in_turn(graph: Graph, origin: int) -> Graph:
    """The graph with the edges that this takes, in the name of the directive that made microbatches."""
    chunks: dict[int, list[Chunk]] = defaultdict(list)
    for node in graph.chunks:
        chunks[graph.microbatch(node)].append(node)
    edges = list(graph.edges)
    for number in range(1, len(chunks)):
        first = [n for n in chunks[number] if not any(map(graph.producers.get, n.inputs))]
        edges += (OrderEdge(n.name, f.name, origin) for n in chunks[number - 1] for f in first)
    return rewired(graph, edges=tuple(edges))
