"""Overlap: chunks that take turns in; which communication is dispatched before whose turn out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from piper.ir.communication import communication
from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import TRACED, Chunk, Comm, Node, Read


def talking(graph: Graph, member: Sequence[str]) -> set[str]:
    """The chunks of a member of a group that communication follows."""
    known = _predecessors_in_turns(graph, member)
    found: set[str] = set()
    for name in member:
        known.add(name)
        if _following(graph, name, known):
            found.add(name)
    return found


def issue_edges(graph: Graph, turns: Sequence[str], *, device: str) -> list[OrderEdge]:
    """A chunk's communication is dispatched before the next turn, so that it runs behind it.

    A host read blocks dispatch until its chunk is complete. On CUDA it would keep the next turn from
    being queued, so that it, and the payload whose sizes it reads, is dispatched after that. Rows that
    come back, and gradients, travel by sizes that were read before.
    """
    edges: list[OrderEdge] = []
    done: set[str] = set()
    before = _predecessors_in_turns(graph, turns)
    for name, following in pairwise(turns):
        done.add(name)
        behind = _following(graph, name, done | before)
        read = {value for node in behind if isinstance(node, Read) for value in node.outputs}
        for node in behind:
            late = isinstance(node, Read) or not read.isdisjoint(node.inputs)
            if device == "cuda" and late:
                edges.append(OrderEdge(following, node.name, TRACED, issued=True))
            else:
                edges.append(OrderEdge(node.name, following, TRACED, issued=True))
    return edges


def is_gathered_again(graph: Graph, node: Comm) -> bool:
    """Whether it gathers for backwards what a forward made, since that was not kept as a whole."""
    value = graph.values[node.outputs[0]]
    if value.role != "activation" or not (value.cut and communication(node.comm).gathers):
        return False
    readers = [graph.nodes[name] for name in graph.readers.get(value.name, ())]
    late = bool(readers) and all(isinstance(n, Chunk) and n.phase != "F" for n in readers)
    return late and all(graph.nodes[n].phase == "F" for n in _chunk_sources(graph, node))  # type: ignore[union-attr]


def _predecessors_in_turns(graph: Graph, turns: Sequence[str]) -> set[str]:
    """Chunks outside of the group that feed its first ones: they are over when it starts."""
    inside = set(turns)
    return {
        source
        for name in turns
        for source in _chunk_sources(graph, graph.nodes[name])
        if source not in inside
    }


def _following(graph: Graph, name: str, known: set[str]) -> list[Node]:
    """Communication and host reads behind a chunk that need no chunk outside of `known`."""
    at = graph.nodes[name].slice
    followers: dict[str, Node] = {}
    stack = [name]
    while stack:
        for value in graph.nodes[stack.pop()].outputs:
            for reader in graph.readers.get(value, ()):
                node = graph.nodes[reader]
                if reader in followers or node.slice != at or isinstance(node, Chunk):
                    continue
                if _talking(graph, node) and _chunk_sources(graph, node) <= known:
                    followers[reader] = node
                    stack.append(reader)
    return list(followers.values())


def _talking(graph: Graph, node: Node) -> bool:
    """What can follow from a chunk alone: not what belongs to a whole step, nor a receive, nor what is
    gathered a second time, for a backward that may be far."""
    if not isinstance(node, Comm):
        return isinstance(node, Read)
    of_others = graph.is_of_a_step(node) or is_gathered_again(graph, node)
    return communication(node.comm).brings and not of_others


def _chunk_sources(graph: Graph, node: Node) -> set[str]:
    """The chunks whose results reach a node without passing through another chunk."""
    known: dict[str, set[str]] = graph.__dict__.setdefault("chunk_sources", {})
    if node.name in known:
        return known[node.name]
    sources: set[str] = set()
    stack = [node]
    while stack:
        for value in stack.pop().inputs:
            for name in graph.producers.get(value, ()):
                source = graph.nodes[name]
                if isinstance(source, Chunk):
                    sources.add(name)
                else:
                    stack.append(source)
    known[node.name] = sources
    return sources
