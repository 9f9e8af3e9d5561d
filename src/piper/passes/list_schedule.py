"""schedule: one global order of all nodes; each slice dispatches its part of it.

List scheduling on estimated costs, under the data edges and the order edges. Because every rank's
dispatch order is a part of one topological order, ranks cannot wait for each other in a circle, and
every pair of ranks sees its messages, and every group its collectives, in the same order.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from piper.cost.estimate import estimate
from piper.errors import PlanError
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Comm, Node, Settle, Update
from piper.ir.sorting import successors
from piper.mesh import Slice

_Queue = tuple[Slice | None, str]  # the in-order queue of a slice that a node runs on


def schedule(graph: Graph, flops: Mapping[str, float]) -> Graph:
    """The same graph with its nodes in the order in which they are to be dispatched."""
    return _Simulation(graph, flops).run()


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
    def __init__(self, graph: Graph, flops: Mapping[str, float]) -> None:
        self.graph = graph
        self.flops = flops
        self.following = successors(graph)
        self.issuing: dict[str, list[str]] = defaultdict(
            list
        )  # node -> who may not start before it
        for edge in graph.edges:
            if edge.issued:
                self.issuing[edge.before].append(edge.after)
        self.together = _collectives(graph)  # node -> all nodes of its collective
        self.missing: dict[str, int] = defaultdict(int)
        for targets in (*self.following.values(), *self.issuing.values()):
            for target in targets:
                self.missing[target] += 1
        self.rank = {
            name: _rank(graph, node, i) for i, (name, node) in enumerate(graph.nodes.items())
        }
        self.ready: dict[_Queue, list[tuple[tuple[int, int, int], str]]] = defaultdict(list)
        self.later: dict[_Queue, list[tuple[float, tuple[int, int, int], str]]] = defaultdict(list)
        self.free_at: dict[_Queue, float] = defaultdict(float)
        self.inputs_at: dict[str, float] = defaultdict(float)
        self.wake: list[tuple[float, int, _Queue]] = []
        self.number: dict[_Queue, int] = {}
        self.order: list[str] = []

    def run(self) -> Graph:
        for name in self.graph.nodes:
            if self.missing[name] == 0:
                self._arrived(name)
        while self.wake:
            now, _, queue = heapq.heappop(self.wake)
            self._advance(queue, now)
        if len(self.order) != len(self.graph.nodes):
            left = next(name for name in self.graph.nodes if name not in set(self.order))
            raise PlanError(f"{left} can never start")
        nodes = {name: self.graph.nodes[name] for name in self.order}
        return msgspec.structs.replace(self.graph, nodes=nodes)

    def _arrived(self, name: str) -> None:
        """All inputs of a node are there; a collective also waits for its other members."""
        members = self.together.get(name, (name,))
        if any(self.missing[member] > 0 for member in members):
            return
        at = max(self.inputs_at[member] for member in members)
        leader = members[0]
        queue = self._queue(leader)
        heapq.heappush(self.later[queue], (at, self.rank[leader], leader))
        self._wake(max(at, self.free_at[queue]), queue)

    def _wake(self, at: float, queue: _Queue) -> None:
        heapq.heappush(self.wake, (at, self.number.setdefault(queue, len(self.number)), queue))

    def _queue(self, name: str) -> _Queue:
        node = self.graph.nodes[name]
        return node.slice, node.stream

    def _advance(self, queue: _Queue, now: float) -> None:
        later, ready = self.later[queue], self.ready[queue]
        if self.free_at[queue] > now:
            if ready or later:
                self._wake(self.free_at[queue], queue)
            return
        while later and later[0][0] <= now:
            _, rank, name = heapq.heappop(later)
            heapq.heappush(ready, (rank, name))
        if ready:
            self._start(heapq.heappop(ready)[1], now)
        if ready or later:
            self._wake(max(now, self.free_at[queue], 0 if ready else later[0][0]), queue)

    def _start(self, name: str, now: float) -> None:
        for member in self.together.get(name, (name,)):
            end = now + estimate(self.graph, self.graph.nodes[member], self.flops)
            self.free_at[self._queue(member)] = end
            if _is_send(self.graph.nodes[member]):
                for target in self.following[member]:  # messages are received as they were sent
                    self.rank[target] = (0, len(self.order), 0)
            self.order.append(member)
            for target in self.following[member]:
                self._passed(target, end)
            for target in self.issuing.get(member, ()):
                self._passed(target, now)

    def _passed(self, target: str, at: float) -> None:
        """One of the things that a node waits for is over at a time."""
        self.inputs_at[target] = max(self.inputs_at[target], at)
        self.missing[target] -= 1
        if self.missing[target] == 0:
            self._arrived(target)


def _collectives(graph: Graph) -> dict[str, tuple[str, ...]]:
    members: dict[str, list[str]] = defaultdict(list)
    for comm in graph.comms:
        if not communication(comm.comm).is_message and len(comm.group.slices) > 1:
            members[comm.key].append(comm.name)
    return {name: tuple(names) for names in members.values() for name in names}


def _is_send(node: Node) -> bool:
    return isinstance(node, Comm) and communication(node.comm).sends


def _rank(graph: Graph, node: Node, index: int) -> tuple[int, int, int]:
    """What runs first when several could: what others wait for, then Updates, so that what follows them
    runs behind BW, then what frees memory, then forwards; early microbatches first."""
    first = 0
    if isinstance(node, Update | Settle):
        first = 1
    elif isinstance(node, Chunk):
        first = {"BW": 2, "F": 3}.get(node.phase, 0)
    elif isinstance(node, Comm) and communication(node.comm).of_a_step:
        first = 4
    return (first, graph.microbatch(node), index)
