"""schedule: one global order of all nodes; each slice dispatches its part of it.

List scheduling on estimated costs, under the data edges and the order edges. Because every rank's
dispatch order is a part of one topological order, ranks cannot wait for each other in a circle, and
every pair of ranks sees its messages, and every group its collectives, in the same order.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from typing import NamedTuple

from piper.cost.estimate import NodeSeconds
from piper.errors import PlanError
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.nodes import COMPUTE, Accumulate, Chunk, Comm, Node, Settle, Update
from piper.ir.order.sorting import data_successors, edge_successors, reordered
from piper.mesh import Slice

_Rank = tuple[int, int, int]
_AT_ONCE = -1


class Ordered(NamedTuple):
    """A graph with its nodes in the order in which they are to be dispatched; and when each is expected
    to start and to end, in that order."""

    graph: Graph
    times: list[tuple[float, float]]


def schedule(graph: Graph, seconds: NodeSeconds) -> Ordered:
    simulation = _Simulation(graph, seconds)
    return Ordered(simulation.run(), simulation.times)


def crossed_messages(graph: Graph) -> tuple[str, str, str] | None:
    """Two messages of one channel that are received in another order than they are sent."""
    sent: dict[tuple[tuple[Slice, ...], str], list[str]] = defaultdict(list)
    received: dict[tuple[tuple[Slice, ...], str], list[str]] = defaultdict(list)
    for comm in graph.comms:
        kind = communication(comm.comm)
        if kind.is_message:
            channel = sent if kind.sends else received
            channel[comm.group.slices, comm.stream].append(comm.key)
    for through, keys in sent.items():
        for one, other in zip(keys, received[through], strict=True):
            if one != other:
                return one, other, other
    return None


class _Simulation:
    """Queues that start their nodes as soon as inputs and queue allow it, in the order of time."""

    def __init__(self, graph: Graph, seconds: NodeSeconds) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.seconds = seconds
        self.following = data_successors(graph)
        self.ordered = edge_successors(edge for edge in graph.edges if not edge.issued)
        self.issuing = edge_successors(edge for edge in graph.edges if edge.issued)
        self.together = _collectives(graph)  # node -> all nodes of its collective
        self.missing = dict.fromkeys(graph.nodes, 0)
        for successors in (self.following, self.ordered, self.issuing):
            for targets in successors.values():
                for target in targets:
                    self.missing[target] += 1
        self.rank = _ranks(graph)
        self.adds_left = _additions(graph)  # sum of a bucket -> what is still to be added to it
        self.queue_of = _queues(graph)
        self.computes = {self.queue_of[n.name] for n in graph.nodes.values() if n.stream == COMPUTE}
        num_queues = max(self.queue_of.values(), default=-1) + 1
        self.ready: list[list[tuple[_Rank, str]]] = [[] for _ in range(num_queues)]
        self.later: list[list[tuple[float, _Rank, str]]] = [[] for _ in range(num_queues)]
        self.free_at = [0.0] * num_queues
        self.pending = [math.inf] * num_queues  # when a queue is next looked at
        self.number: dict[int, int] = {}  # of queues, in the order in which they begin
        self.wake: list[tuple[float, bool, int, int]] = []
        self.inputs_at = dict.fromkeys(graph.nodes, 0.0)
        self.order: list[str] = []
        self.times: list[tuple[float, float]] = []

    def run(self) -> Graph:
        for name, missing in self.missing.items():
            if missing == 0:
                self._arrived(name)
        while self.wake:
            now, *_, queue = heapq.heappop(self.wake)
            if self.pending[queue] == now:  # else it was woken before, and knows when to go on
                self.pending[queue] = math.inf
                self._advance(queue, now)
        if len(self.order) != len(self.nodes):
            started = set(self.order)
            left = next(name for name in self.nodes if name not in started)
            raise PlanError(f"{left} can never start")
        return reordered(self.graph, self.order)

    def _arrived(self, name: str) -> None:
        """All inputs of a node are there; a collective also waits for its other members."""
        members = self.together.get(name)
        if members is None:
            at = self.inputs_at[name]
        else:
            if any(self.missing[member] > 0 for member in members):
                return
            at = max(self.inputs_at[member] for member in members)
            name = members[0]
        queue = self.queue_of[name]
        if self._ends_a_sum(self.nodes[name]):
            self.rank[name] = (_AT_ONCE, *self.rank[name][1:])
        heapq.heappush(self.later[queue], (at, self.rank[name], name))
        self._wake(max(at, self.free_at[queue]), queue)

    def _ends_a_sum(self, node: Node) -> bool:
        """Whether a gradient is whole after this, and its reduction can begin beside what follows."""
        return isinstance(node, Accumulate) and self.adds_left.get(node.outputs[0]) == 1

    def _wake(self, at: float, queue: int) -> None:
        """Look at a queue at a time, or before: it then finds by itself when to look again. Of those
        that are looked at in one moment, communication comes first: it goes on beside the host."""
        if at < self.pending[queue]:
            self.pending[queue] = at
            number = self.number.setdefault(queue, len(self.number))
            heapq.heappush(self.wake, (at, queue in self.computes, number, queue))

    def _advance(self, queue: int, now: float) -> None:
        later, ready = self.later[queue], self.ready[queue]
        if self.free_at[queue] > now:
            if ready or later:
                self._wake(self.free_at[queue], queue)
            return
        while later and later[0][0] <= now:
            _, rank, name = heapq.heappop(later)
            heapq.heappush(ready, (rank, name))
        if ready:
            name = heapq.heappop(ready)[1]
            for member in self.together.get(name, (name,)):
                self._start(member, now)
        if ready or later:
            self._wake(max(now, self.free_at[queue], 0 if ready else later[0][0]), queue)

    def _start(self, name: str, now: float) -> None:
        node = self.nodes[name]
        end = now + self.seconds(node)
        self.free_at[self.queue_of[name]] = end
        following, ordered = self.following[name], self.ordered.get(name, ())
        if _is_send(node):
            for target in (*following, *ordered):  # messages are received as they were sent
                self.rank[target] = (0, len(self.order), 0)
        if isinstance(node, Accumulate) and node.outputs[0] in self.adds_left:
            self.adds_left[node.outputs[0]] -= 1
        self.order.append(name)
        self.times.append((now, end))
        for target in following:
            self._passed(target, end)
        for target in ordered:
            self._passed(target, end)
        for target in self.issuing.get(name, ()):
            self._passed(target, now)

    def _passed(self, target: str, at: float) -> None:
        """One of the things that a node waits for is over at a time."""
        if at > self.inputs_at[target]:
            self.inputs_at[target] = at
        self.missing[target] -= 1
        if self.missing[target] == 0:
            self._arrived(target)


def _queues(graph: Graph) -> dict[str, int]:
    """Node -> the number of the in-order queue of a slice that it runs on."""
    numbers: dict[tuple[Slice | None, str], int] = {}
    by_slice: dict[int, dict[str, int]] = {}  # equal slices are few objects, and slow to hash
    queue_of: dict[str, int] = {}
    for name, node in graph.nodes.items():
        known = by_slice.setdefault(id(node.slice), {})
        queue = known.get(node.stream)
        if queue is None:
            queue = numbers.setdefault((node.slice, node.stream), len(numbers))
            known[node.stream] = queue
        queue_of[name] = queue
    return queue_of


def _collectives(graph: Graph) -> dict[str, tuple[str, ...]]:
    members: dict[str, list[str]] = defaultdict(list)
    for comm in graph.comms:
        if not communication(comm.comm).is_message and len(comm.group.slices) > 1:
            members[comm.key].append(comm.name)
    return {name: tuple(names) for names in members.values() for name in names}


def _additions(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in graph.nodes.values():
        if isinstance(node, Accumulate) and graph.values[node.outputs[0]].bucket >= 0:
            found[node.outputs[0]] += 1
    return found


def _is_send(node: Node) -> bool:
    return isinstance(node, Comm) and communication(node.comm).sends


def _ranks(graph: Graph) -> dict[str, _Rank]:
    """What runs first when several could: the end of a gradient's sum, terms of what is communicated
    within a microbatch, what others wait for, then Updates, so that what follows them runs behind BW,
    then what frees memory, then forwards; early microbatches first."""
    brought = {name for comm in graph.comms for name in comm.inputs}
    sent = {name for name in brought if graph.values[name].bucket < 0}
    return {
        name: (_urgency(graph, node, sent), graph.microbatch(node), index)
        for index, (name, node) in enumerate(graph.nodes.items())
    }


def _urgency(graph: Graph, node: Node, sent: set[str]) -> int:
    if isinstance(node, Accumulate) and node.outputs[0] in sent:
        return _AT_ONCE
    if isinstance(node, Chunk):
        return {"BW": 2, "F": 3}.get(node.phase, 0)
    if isinstance(node, Comm):
        return 4 if graph.is_of_a_step(node) else 0
    return 1 if isinstance(node, Update | Settle) else 0
