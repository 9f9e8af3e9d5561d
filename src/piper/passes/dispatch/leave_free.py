"""leave_free: the paced graph in; chunks that leave multiprocessors to communication beside them out.

A matrix product takes a device whole and divides its work evenly. If communication holds a few
multiprocessors, what was meant for them comes after all the rest, and the product takes up to twice as
long. A product that knows of it takes the others alone, and loses a tenth.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from piper.cost.estimate import NodeSeconds
from piper.ir.communication import LEFT, MOST_LEFT, communication
from piper.ir.graph import Graph, stream_called
from piper.ir.nodes import Chunk, Comm, Node
from piper.ir.order.sorting import data_successors, edge_successors
from piper.mesh import Slice

BESIDE = 0.2  # of a chunk's time: with less communication beside it, it takes the whole device

_Times = dict[str, tuple[float, float]]


def leave_free(graph: Graph, seconds: NodeSeconds) -> Graph:
    """The graph with `leaves` of its chunks set."""
    times = _times(graph, seconds)
    talks: dict[Slice | None, list[tuple[float, float, int]]] = defaultdict(list)
    for comm in graph.comms:
        begin, end = times[comm.name]
        if end > begin:
            left = stream_called(graph.streams, comm.stream).max_sms or LEFT
            talks[comm.slice].append((begin, end, min(left, MOST_LEFT)))
    found = {at: _Talks(spans) for at, spans in talks.items()}
    nodes: dict[str, Node] = {}
    for name, node in graph.nodes.items():
        if isinstance(node, Chunk) and node.slice in found:
            left = found[node.slice].left_by(*times[name])
            node = msgspec.structs.replace(node, leaves=left) if left else node
        nodes[name] = node
    return msgspec.structs.replace(graph, nodes=nodes)


def _times(graph: Graph, seconds: NodeSeconds) -> _Times:
    """When each node starts and ends, each slice dispatching its nodes in the graph's order."""
    ready = dict.fromkeys(graph.nodes, 0.0)
    free: dict[tuple[Slice | None, str], float] = defaultdict(float)
    following = data_successors(graph)
    ordered = edge_successors(edge for edge in graph.edges if not edge.issued)
    issuing = edge_successors(edge for edge in graph.edges if edge.issued)
    sent: dict[str, str] = {}  # the key of a message -> who sends it
    times: _Times = {}
    for name, node in graph.nodes.items():
        queue = (node.slice, node.stream)
        begin = max(free[queue], ready[name])
        end = begin + seconds(node)
        if isinstance(node, Comm) and communication(node.comm).is_message:
            sender = sent.setdefault(node.key, name)
            if sender != name:
                begin, end = _received(times[sender], free[queue], begin)
                times[sender] = times[sender][0], max(times[sender][1], end)
        free[queue] = end
        times[name] = begin, end
        for target in (*following[name], *ordered.get(name, ())):
            ready[target] = max(ready[target], end)
        for target in issuing.get(name, ()):
            ready[target] = max(ready[target], begin)
    return times


def _received(sent: tuple[float, float], free: float, ready: float) -> tuple[float, float]:
    """A message is received while it is sent; a receiver that comes later holds up its sender."""
    begin = max(sent[0], free, ready if ready > sent[1] else 0.0)
    return begin, begin + sent[1] - sent[0]


class _Talks:
    """When there is communication on a slice."""

    def __init__(self, spans: Iterable[tuple[float, float, int]]) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.left: list[int] = []
        for begin, end, left in sorted(spans):
            if self.ends and begin <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
                self.left[-1] = max(self.left[-1], left)
            else:
                self.begins.append(begin)
                self.ends.append(end)
                self.left.append(left)

    def left_by(self, begin: float, end: float) -> int:
        """What is left to communication by what runs meanwhile; 0 if there is little of it."""
        first, last = bisect_right(self.ends, begin), bisect_left(self.begins, end)
        beside = sum(
            min(end, self.ends[i]) - max(begin, self.begins[i]) for i in range(first, last)
        )
        if beside < BESIDE * (end - begin) or last <= first:
            return 0
        return max(self.left[first:last])
