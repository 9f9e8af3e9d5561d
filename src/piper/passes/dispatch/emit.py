"""emit: the scheduled physical graph in, the Plan out: slots, events and frees per class of ranks."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.ir.graph import Graph, Stream, stream_called
from piper.ir.nodes import COMPUTE, Node
from piper.ir.values import Value
from piper.mesh import Group, Slice
from piper.passes.dispatch.node_tasks import Numbering, make_task
from piper.passes.dispatch.shared_buffers import share_buffers
from piper.passes.dispatch.waits import waits_of
from piper.passes.physical.buckets import Bucketed
from piper.plan.keys import KEY
from piper.plan.slots import LINGERING, SLOT_KINDS, STAYING, Slot
from piper.plan.tasks import Task, sends
from piper.plan.types import RankClass

_KINDS = {
    "param": "param",
    "buffer": "buffer",
    "batch": "batch",
    "key": "key",
    "constant": "constant",
    "coordinate": "coordinate",
    "flat": "flat",
    "shard": "shard",
    "gathered": "gathered",
    "gradient": "grad",
    "unreduced": "unreduced",
    "sum": "sum",
    "splits": "host",
}


def emit(
    graph: Graph, bucketed: Bucketed
) -> tuple[tuple[RankClass, ...], tuple[Stream, ...], tuple[Group, ...]]:
    """One class per slice. Nodes are dispatched in the order in which they stand in the graph."""
    by_slice: dict[Slice, list[Node]] = defaultdict(list)
    for node in graph.nodes.values():
        assert node.slice is not None
        by_slice[node.slice].append(node)
    declared = [stream.name for stream in graph.streams]
    names = dict.fromkeys([COMPUTE, *declared, *(node.stream for node in graph.nodes.values())])
    streams = tuple(stream_called(graph.streams, name) for name in names)
    groups: dict[Group, int] = {}
    for node in graph.nodes.values():
        group = getattr(node, "group", None)
        if group is not None:
            groups.setdefault(group, len(groups))
    number = {stream.name: index for index, stream in enumerate(streams)}
    classes = tuple(
        _Emitter(graph, bucketed, by_slice[at], number, groups).rank_class(at)
        for at in sorted(by_slice)
    )
    return classes, streams, tuple(groups)


class _Emitter:
    """The slots and tasks of one class."""

    def __init__(
        self,
        graph: Graph,
        bucketed: Bucketed,
        nodes: list[Node],
        streams: dict[str, int],
        groups: dict[Group, int],
    ) -> None:
        self.graph = graph
        self.bucketed = bucketed
        self.nodes = nodes
        self.streams = streams
        self.numbering = Numbering(graph, bucketed, self._slot, groups, nodes)
        self.slots: list[Slot] = []
        self.slot_of: dict[str, int] = {}
        self.position = {node.name: index for index, node in enumerate(nodes)}

    def rank_class(self, at: Slice) -> RankClass:
        drafts = [make_task(n, self.numbering, self.streams[n.stream]) for n in self.nodes]
        frees = self._frees(drafts)
        after = self._dependencies(drafts, frees)
        results = self._results(at)
        slots = self.slots
        buffers = share_buffers(slots, drafts, frees, after, keep=results.values())
        for slot, buffer in buffers.items():
            slots[slot] = msgspec.structs.replace(slots[slot], pool=buffer)
        blocking = {i for i, task in enumerate(drafts) if task.blocks}
        waits = waits_of([task.stream for task in drafts], after, blocking)
        tasks = tuple(
            msgspec.structs.replace(task, waits=waits[i], frees=tuple(frees.get(i, ())))
            for i, task in enumerate(drafts)
        )
        return RankClass(at, tuple(slots), tasks, results, self._overlaps())

    def _overlaps(self) -> tuple[tuple[int, ...], ...]:
        """Per group of chunks that take turns, all tasks dispatched from its first to its last."""
        found = []
        for turns in self.graph.overlaps:
            if turns[0] in self.position:
                places = [self.position[name] for name in turns]
                found.append(tuple(range(min(places), max(places) + 1)))
        return tuple(found)

    def _results(self, at: Slice) -> dict[str, int]:
        found: dict[str, int] = {}
        for what in ("loss", "count", *(f"metric.{name}" for name in self.graph.metrics)):
            for name in (f"${what}@{at}", f"$sum.{what}@{at}"):
                if name in self.slot_of:
                    found.setdefault(what, self.slot_of[name])
        for value in self.graph.values.values():
            if value.role == "prediction" and value.name in self.slot_of:
                number = _microbatch(self.graph, value.name)
                found[f"prediction.{number}.{value.of}"] = self.slot_of[value.name]
        for name in (f"$norm@{at}", f"$squares@{at}"):
            if name in self.slot_of:
                found.setdefault("squares", self.slot_of[name])
        return found

    def _slot(self, name: str) -> int:
        found = self.slot_of.get(name)
        if found is None:
            value = self.graph.values[name]
            if value.place:
                found = self._slot(value.place)
            else:
                base = self._slot(value.base) if value.base else -1
                found = len(self.slots)
                self.slots.append(self._new_slot(value, base))
            self.slot_of[name] = found
        return found

    def _new_slot(self, value: Value, base: int) -> Slot:
        kind = _KINDS.get(value.role, "temp")
        source = ""
        if value.role in ("param", "buffer", "batch", "key", "constant", "coordinate"):
            source = value.of.partition("[")[0].removeprefix(KEY)
        elif value.role == "param_grad" and value.bucket < 0:
            source = value.of
        return Slot(
            name=value.name,
            kind=kind,
            type=value.type,
            source=source,
            microbatch=_microbatch(self.graph, value.of) if kind in ("batch", "key") else 0,
            base=base,
            offset=value.offset,
            bucket=value.bucket,
            cut=value.cut if "cut" in SLOT_KINDS[kind].has else (),
        )

    def _roots(self) -> list[int]:
        """Per slot, the one whose memory it shows: a slot comes after that."""
        roots: list[int] = []
        for index, slot in enumerate(self.slots):
            roots.append(roots[slot.base] if slot.base >= 0 else index)
        return roots

    def _frees(self, tasks: list[Task]) -> dict[int, list[int]]:
        """Task -> slots that nobody touches after it in dispatch order."""
        last: dict[int, int] = {}
        roots = self._roots()
        for index, task in enumerate(tasks):
            for slot in (*task.reads, *task.writes):
                last[roots[slot]] = index
        keep = set(self._results(self.nodes[0].slice or Slice()).values())
        found: dict[int, list[int]] = defaultdict(list)
        for slot, index in last.items():
            if self.slots[slot].kind not in STAYING | LINGERING and slot not in keep:
                found[index].append(slot)
        return found

    def _dependencies(self, tasks: list[Task], frees: dict[int, list[int]]) -> list[set[int]]:
        """Task -> earlier tasks that must be complete: whatever it reads, overwrites or frees."""
        writer: dict[int, int] = {}  # slot -> the last task that wrote it
        readers: dict[int, list[int]] = defaultdict(list)  # slot -> tasks that read it since
        found: list[set[int]] = []
        roots = self._roots()
        sending = {index for index, task in enumerate(tasks) if sends(task)}
        for index, task in enumerate(tasks):
            reads = [roots[slot] for slot in task.reads]
            writes = [roots[slot] for slot in task.writes]
            after = {writer[slot] for slot in reads if slot in writer}
            for slot in writes:
                after.update(readers[slot])
                if slot in writer:
                    after.add(writer[slot])
            for slot in frees.get(index, ()):
                # A send keeps what it sends: whoever waited for it would wait for another rank.
                after.update([reader for reader in readers[slot] if reader not in sending])
                if slot in writer:
                    after.add(writer[slot])
            after.discard(index)
            found.append(after)
            for slot in reads:
                readers[slot].append(index)
            for slot in writes:
                writer[slot] = index
                readers[slot] = []
        for edge in self.graph.edges:
            if edge.issued:
                continue
            if edge.before in self.position and edge.after in self.position:
                found[self.position[edge.after]].add(self.position[edge.before])
        return found


def _microbatch(graph: Graph, name: str) -> int:
    """The microbatch that a Value such as `batch.x[DIR=0,MB=3]` belongs to."""
    text = name.partition("[")[2].rstrip("]")
    tags = dict(word.split("=") for word in text.split(",") if word)
    index = 0
    for split in graph.splits:
        index = index * split.num + int(tags.get(split.tag, 0))
    return index
