"""hold_again: what runs again for a backward, and what is gathered again, does not before a gradient is
near, unless an order says when: memory would be in use meanwhile, and links busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from piper.ir.communication import communication
from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import TRACED, Chunk, Comm
from piper.ir.order.overlap import is_gathered_again
from piper.ir.order.sorting import rewired

_GRADIENTS = ("grad", "sum")
_BACKWARDS = ("B", "BI", "BW")


def hold_again(graph: Graph) -> Graph:
    """The graph with the edges that this takes."""
    ordered = {e.after for e in graph.edges if e.origin != TRACED or e.issued}
    edges = (*_of_code(graph, ordered), *_of_gathers(graph, ordered))
    return rewired(graph, edges=(*graph.edges, *dict.fromkeys(edges))) if edges else graph


def _of_code(graph: Graph, ordered: set[str]) -> Iterator[OrderEdge]:
    """What runs again waits for the receive of the gradient. An order of backwards says as much: code
    then comes right before them, and does not wait."""
    again: dict[tuple[int, int], list[Chunk]] = defaultdict(list)
    for node in graph.chunks:
        if node.phase == "R" and node.name not in ordered:
            again[node.piece_of, graph.microbatch(node)].append(node)
    for node in graph.chunks if again else ():
        nodes = again.get((node.piece_of, graph.microbatch(node)), ())
        for receive in _sources(graph, node, Comm) if nodes and node.phase in _BACKWARDS else ():
            yield from (OrderEdge(receive, each.name, TRACED) for each in nodes)


def _of_gathers(graph: Graph, ordered: set[str]) -> Iterator[OrderEdge]:
    """What is gathered again waits for what the chunk before its first reader waits for: it arrives
    beside that chunk."""
    runs_behind: dict[str, list[str]] = defaultdict(list)
    for edge in graph.edges:
        runs_behind[edge.after].append(edge.before)
    for comm in graph.comms:
        if comm.name in ordered or not is_gathered_again(graph, comm):
            continue
        first = graph.nodes[graph.readers[comm.outputs[0]][0]]
        assert isinstance(first, Chunk)
        for before in _chunks_before(graph, first, runs_behind[first.name]):
            for name in graph.nodes[before].inputs:
                if graph.values[name].role in _GRADIENTS:
                    for source in graph.producers.get(name, ()):
                        yield OrderEdge(source, comm.name, TRACED)


def _chunks_before(graph: Graph, node: Chunk, behind: list[str]) -> Iterator[str]:
    """The chunks right before one: by gradients, or as it was ordered."""
    if node.phase == "R":
        yield from (name for name in behind if isinstance(graph.nodes[name], Chunk))
        return
    other_half = f"BI{node.name.removeprefix('BW')}"
    if node.phase == "BW" and other_half in graph.nodes:
        yield other_half
        return
    yield from _sources(graph, node, Chunk)


def _sources(graph: Graph, backward: Chunk, kind: type[Chunk | Comm]) -> Iterator[str]:
    """What gradients come from: chunks of the same slice, or what brings them from others."""
    stack = [name for name in backward.inputs if graph.values[name].role in _GRADIENTS]
    seen = set(stack)
    while stack:
        for name in graph.producers.get(stack.pop(), ()):
            node = graph.nodes[name]
            if node.slice != backward.slice:
                continue
            receives = isinstance(node, Comm) and not communication(node.comm).brings
            if isinstance(node, Chunk) or receives:
                if isinstance(node, kind):
                    yield name
                continue
            stack += [value for value in node.inputs if value not in seen]
            seen.update(node.inputs)
