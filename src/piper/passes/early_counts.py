"""early_counts: a complete logical graph in, the chunks to cut behind the counts of experts out."""

from __future__ import annotations

from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.ir.routing import counts_of
from piper.ir.select import matching


def early_counts(graph: Graph) -> set[tuple[int, int]]:
    """(chunk, sharded chunk): the first makes the counts of the second, and is cut behind them.

    What is left of it, the taking of rows, then runs beside the exchange of counts. Chunks that take
    turns with others stay whole: their counts travel beside the other's turn, and a short turn of their
    own would leave that without company.
    """
    turning = _taking_turns(graph)
    found: dict[int, int] = {}  # sharded chunk -> the one that makes its counts
    for node in graph.chunks:
        sharded = node.phase == "F" and any(owner.shares == "experts" for owner in node.owners)
        if sharded and node.chunk not in found:
            for name in graph.producers.get(counts_of(graph, node), ()):
                source = graph.nodes[name]
                if isinstance(source, Chunk) and source.slice == node.slice:
                    found[node.chunk] = source.chunk
    return {(source, sharded) for sharded, source in found.items() if source not in turning}


def _taking_turns(graph: Graph) -> set[int]:
    groups = [group for order in graph.orders for group in order.groups if len(group) > 1]
    selectors = {selector for group in groups for member in group for selector in member}
    names = {name for selector in selectors for name in matching(graph, selector)}
    nodes = (graph.nodes[name] for name in names)
    return {node.chunk for node in nodes if isinstance(node, Chunk)}
