"""pace: gathers and receives start shortly before the chunk that needs them, whatever the timing.

In: the scheduled graph. Out: the same order of chunks, with a gather of parameters (ZeRO 3) before each
use, receives held back and reductions of whole buckets (ZeRO 2 and 3) in step with the sums, so that
memory and waiting communication are bounded.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from piper.ir.communication import communication
from piper.ir.graph import Graph, OrderEdge
from piper.ir.layouts import REPLICATED
from piper.ir.nodes import TRACED, Accumulate, Chunk, Comm, Node
from piper.ir.order.sorting import edge_successors
from piper.ir.tensor_type import TensorType
from piper.ir.values import RESULTS, SUMMED, Value
from piper.mesh import Slice
from piper.passes.physical.buckets import Bucketed
from piper.passes.physical.relayout import Way, collective, laid

RECEIVE_AHEAD = 2  # chunks before the one that reads what is received
WHOLE_SUMS = 2  # gradients of whole buckets that wait for their reduction at once


@dataclass
class _Gather:
    """One gather of a bucket: the chunks that use it, and the parameters that they read of it."""

    bucket: int
    users: list[int]  # positions among the slice's chunks
    params: dict[str, None] = field(default_factory=dict)


def pace(graph: Graph, bucketed: Bucketed) -> Graph:
    """The graph with gathers added and receives moved; its order stays topological."""
    pacing = _Pacing(graph, bucketed)
    for (at, _), receives in pacing.receives.items():
        pacing.hold_receives(pacing.chunks[at], receives)
    for at, gathers in pacing.parts.items():
        pacing.hold_parts(pacing.chunks[at], gathers)
    for at, names in pacing.chunks.items():
        pacing.add_gathers(at, names)
    for at in list(pacing.chunks):
        pacing.bound_sums(at)
    pacing.end_with_results()
    return pacing.graph_in_order()


class _Pacing:
    def __init__(self, graph: Graph, bucketed: Bucketed) -> None:
        self.graph = graph
        self.bucketed = bucketed
        self.changed: dict[str, Node] = {}
        self.values: dict[str, Value] = dict(graph.values)
        self.edges: list[OrderEdge] = list(graph.edges)
        asked = [e for e in graph.edges if e.origin != TRACED or e.issued]
        self.ordered = {name for e in asked for name in (e.before, e.after)}  # by the user
        self.following = edge_successors(e for e in graph.edges if not e.issued)
        self.behind: dict[str, list[Node]] = defaultdict(
            list
        )  # node -> what is dispatched after it
        self.ahead: dict[str, list[Node]] = defaultdict(list)  # and before it
        self.start: list[Node] = []
        self.end: list[Node] = []
        self.moved: set[str] = set()
        self.chunks: dict[Slice, list[str]] = defaultdict(list)
        self.receives: dict[tuple[Slice, str], list[Comm]] = defaultdict(list)
        self.parts: dict[Slice, list[Comm]] = defaultdict(list)  # gathers of what is cut
        # Per slice, whole buckets' sums, each with all that is added to it.
        self.sums: dict[Slice, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.place = {name: place for place, name in enumerate(graph.nodes)}
        self.chunks_before: dict[str, int] = {}  # node -> chunks dispatched before it on its slice
        for node in graph.nodes.values():
            assert node.slice is not None
            self.chunks_before[node.name] = len(self.chunks[node.slice])
            if isinstance(node, Chunk):
                self.chunks[node.slice].append(node.name)
            elif isinstance(node, Comm) and node.comm == "recv":
                self.receives[node.slice, node.stream].append(node)
            elif isinstance(node, Comm) and self._gathers_parts(node):
                self.parts[node.slice].append(node)
            elif isinstance(node, Accumulate) and self._sums_whole(node):
                self.sums[node.slice][node.outputs[0]].append(node.name)

    def graph_in_order(self) -> Graph:
        nodes: dict[str, Node] = {node.name: node for node in self.start}
        for name, node in self.graph.nodes.items():
            for first in self.ahead.get(name, ()):
                nodes[first.name] = first
            if name not in self.moved:
                nodes[name] = self.changed.get(name, node)
            for follower in self.behind.get(name, ()):
                nodes[follower.name] = follower
        nodes |= {node.name: node for node in self.end}
        return msgspec.structs.replace(
            self.graph, nodes=nodes, values=self.values, edges=tuple(self.edges)
        )

    def _dispatch(self, node: Node, chunk: str | None, origin: int) -> None:
        """Dispatch a node after a chunk, and start it when that is complete."""
        if chunk is None:
            self.start.append(node)
        else:
            self.behind[chunk].append(node)
            self.edges.append(OrderEdge(chunk, node.name, origin))

    # What is only reported

    def end_with_results(self) -> None:
        """A collective that no node of the step reads comes last: it would wait for slower ranks beside
        chunks, and take room from them."""
        reported: dict[str, list[Comm]] = defaultdict(list)
        for node in self.graph.nodes.values():
            if isinstance(node, Comm) and self.graph.values[node.outputs[0]].role in RESULTS:
                reported[node.key].append(node)
        for nodes in reported.values():  # one collective, on every slice
            if any(n.name in self.ordered or self.graph.readers.get(n.outputs[0]) for n in nodes):
                continue
            for node in nodes:
                assert node.slice is not None
                self.moved.add(node.name)
                self.end.append(node)
                self.edges.append(OrderEdge(self.chunks[node.slice][-1], node.name, TRACED))

    # Gradients of whole buckets, where only shards stay

    def _sums_whole(self, node: Accumulate) -> bool:
        value = self.graph.values[node.outputs[0]]
        if value.role not in SUMMED or value.bucket < 0 or self._zero(value.bucket) < 2:
            return False
        return self.graph.values[node.inputs[0]].bucket < 0 if node.inputs else True

    def _zero(self, bucket: int) -> int:
        return self.bucketed.keeping[bucket].zero

    def bound_sums(self, at: Slice) -> None:
        """Reduce a sum as soon as it is there, and start none while WHOLE_SUMS others wait for that;
        what has come of them by then is added first. What the user has ordered stays where it is."""
        over: list[tuple[int, str]] = []  # when a sum is there, and what reduces it
        for adds in self.sums[at].values():
            *casts, scatter = self._reduction(adds[-1])
            over.append((self.place[adds[-1]], scatter))
            if scatter not in self.ordered:
                self.moved.update(casts, (scatter,))
                self.behind[adds[-1]] += [self.graph.nodes[each] for each in (*casts, scatter)]
        over.sort()
        for adds in self.sums[at].values():
            before = bisect(over, (self.place[adds[0]],)) - WHOLE_SUMS
            if before >= 0 and over[before][1] not in self.ordered:
                self.edges.append(OrderEdge(over[before][1], adds[0], TRACED))
                self._add_before(over[before][1], adds[0])

    def _add_before(self, scatter: str, start: str) -> None:
        """What reads the rank's part of a sum comes before another sum starts, if not earlier."""
        for reader in self.graph.readers.get(self.graph.nodes[scatter].outputs[0], ()):
            part = isinstance(self.graph.nodes[reader], Accumulate)
            if part and self.place[reader] > self.place[start] and reader not in self.moved:
                self.moved.add(reader)
                self.ahead[start].append(self.graph.nodes[reader])

    def _reduction(self, pack: str) -> list[str]:
        """The nodes from a sum to its reduction: a cast where the wire has another dtype."""
        found = [pack]
        while not isinstance(self.graph.nodes[found[-1]], Comm):
            found += self.graph.readers[self.graph.nodes[found[-1]].outputs[0]]
        return found[1:]

    # Receives, and gathers of what is cut over ranks

    def _gathers_parts(self, node: Comm) -> bool:
        value = self.graph.values[node.outputs[0]]
        return communication(node.comm).gathers and bool(value.cut) and value.bucket < 0

    def hold_receives(self, names: list[str], receives: list[Comm]) -> None:
        """Move one stream's receives to shortly before their use; they keep their order."""
        position = {name: index for index, name in enumerate(names)}
        places: list[tuple[int, Comm]] = []
        latest = len(names)
        for node in reversed(receives):
            wanted = min(self._wanted(node, position), latest)
            latest = min(latest, max(wanted, self.chunks_before[node.name] - 1))
            places.append((wanted, node))
        self._move(names, places[::-1])

    def hold_parts(self, names: list[str], gathers: list[Comm]) -> None:
        """Move gathers to shortly before their use. Their members are ranks of one slice, which have
        one order, whatever it is."""
        position = {name: index for index, name in enumerate(names)}
        places = [(self._wanted(node, position), node) for node in gathers]
        self._move(names, sorted(places, key=lambda each: each[0]))

    def _wanted(self, node: Comm, position: dict[str, int]) -> int:
        """Behind which chunk it may come; it stays where it is if that is earlier."""
        use = self._first_use(node, position)
        if use is None or node.name in self.ordered:
            return -1
        readers = [r for value in node.outputs for r in self.graph.readers.get(value, ())]
        readers += self.following.get(node.name, ())
        before = min((self.chunks_before[r] for r in readers), default=0) - 1
        return min(use - RECEIVE_AHEAD - 1, before)

    def _move(self, names: list[str], places: list[tuple[int, Comm]]) -> None:
        for wanted, node in places:
            if wanted >= self.chunks_before[node.name]:
                self.moved.add(node.name)
                self._dispatch(node, names[wanted], node.origin)

    def _first_use(self, node: Comm, position: dict[str, int]) -> int | None:
        """The first chunk of the slice that needs what is received."""
        uses = [position[name] for name in self.following.get(node.name, ()) if name in position]
        stack, seen = list(node.outputs), set(node.outputs)
        while stack:
            for reader in self.graph.readers.get(stack.pop(), ()):
                if reader in position:
                    uses.append(position[reader])
                elif self.graph.nodes[reader].slice == node.slice:
                    fresh = [v for v in self.graph.nodes[reader].outputs if v not in seen]
                    seen.update(fresh)
                    stack += fresh
        return min(uses, default=None)

    # Gathers

    def add_gathers(self, at: Slice, names: list[str]) -> None:
        """A gather for every use of a bucket that is not kept whole, or for `reuse` uses in a row, or
        for all where that is ONCE."""
        gathers: list[_Gather] = []
        open_gather: dict[int, _Gather] = {}
        for index, name in enumerate(names):
            for bucket, params in self._needed(self.graph.nodes[name]).items():
                gather = open_gather.get(bucket)
                if gather is None or len(gather.users) == self.bucketed.keeping[bucket].reuse:
                    gather = open_gather[bucket] = _Gather(bucket, [])
                    gathers.append(gather)
                gather.users.append(index)
                gather.params |= dict.fromkeys(params)
        for number, gather in enumerate(gathers):
            self._gather(at, names, gather, number, gathers)

    def _needed(self, node: Node) -> dict[int, list[str]]:
        found: dict[int, list[str]] = defaultdict(list)
        for name in node.inputs:
            value = self.graph.values[name]
            if value.role == "param" and value.of in self.bucketed.of:
                bucket = self.bucketed.of[value.of]
                if self._zero(bucket) == 3:
                    found[bucket].append(name)
        return found

    def _gather(
        self, at: Slice, names: list[str], gather: _Gather, number: int, gathers: list[_Gather]
    ) -> None:
        bucket = self.bucketed.buckets[gather.bucket]
        keeping = self.bucketed.keeping[gather.bucket]
        first = gather.users[0]
        wait = first - keeping.prefetch - 1
        # However many buckets a chunk needs, only prefetch + 1 are there for others.
        if number > keeping.prefetch:
            over = gathers[number - keeping.prefetch - 1].users[-1]
            wait = max(wait, over) if over < first else wait
        name = f"gather.{bucket.name}>{names[first]}"
        shard = self.values[f"$shard.{bucket.name}@{at}"]
        whole = Value(
            f"$gathered.{bucket.name}>{names[first]}",
            "gathered",
            TensorType((bucket.size,), bucket.dtype),
            laid(shard.layout, bucket.over, REPLICATED),
            slice=at,
            bucket=gather.bucket,
        )
        self.values[whole.name] = whole
        parts = {param: f"{param}>{names[first]}" for param in gather.params}
        for param, part in parts.items():
            self.values[part] = msgspec.structs.replace(
                self.values[param],
                name=part,
                base=whole.name,
                offset=self.bucketed.offset(self.values[param].of),
            )
        for index in gather.users:
            node = self.changed.get(names[index], self.graph.nodes[names[index]])
            inputs = tuple(parts.get(value, value) for value in node.inputs)
            self.changed[names[index]] = msgspec.structs.replace(node, inputs=inputs)
        tags = self.graph.nodes[names[first]].tags
        way = Way(name, at, keeping.gather_stream, keeping.origin, tags)
        comm = collective(self.graph.mesh, shard, whole, way)
        assert comm is not None
        comm = msgspec.structs.replace(comm, outputs=(whole.name, *parts.values()))
        self._dispatch(comm, names[wait] if wait >= 0 else None, TRACED)
