"""take_turns: a microbatch begins when enough of those before it are over, so that so many at most keep
what their backwards need; where that was chosen, to save memory."""

from __future__ import annotations

from collections import defaultdict

from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import Chunk
from piper.ir.order.sorting import rewired


def take_turns(graph: Graph, most: int, origin: int) -> Graph:
    """The graph with the edges that it takes to have at most so many microbatches under way, in the name
    of the directive that made them."""
    chunks: dict[int, list[Chunk]] = defaultdict(list)
    for node in graph.chunks:
        chunks[graph.microbatch(node)].append(node)
    edges = list(graph.edges)
    for number in range(most, len(chunks)):
        first = [n for n in chunks[number] if not any(map(graph.producers.get, n.inputs))]
        edges += (OrderEdge(n.name, f.name, origin) for n in chunks[number - most] for f in first)
    return rewired(graph, edges=tuple(edges))
