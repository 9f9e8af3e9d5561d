"""emit: the scheduled physical graph in, the Plan out: slots, events and frees per class of ranks."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph, Stream
from piper.ir.nodes import COMPUTE, Accumulate, Chunk, Comm, Node, Read, Update
from piper.ir.values import Value
from piper.mesh import Group, Slice
from piper.passes.events import waits_of
from piper.plan.keys import KEY
from piper.plan.types import RankClass, Slot, SlotKind, Task, TaskKind

_PERSISTENT = ("param", "buffer", "constant", "grad")


def emit(graph: Graph) -> tuple[tuple[RankClass, ...], tuple[Stream, ...], tuple[Group, ...]]:
    """One class per slice. Nodes are dispatched in the order in which they stand in the graph."""
    by_slice: dict[Slice, list[Node]] = defaultdict(list)
    for node in graph.nodes.values():
        assert node.slice is not None
        by_slice[node.slice].append(node)
    declared = {stream.name: stream for stream in graph.streams}
    names = dict.fromkeys([COMPUTE, *declared, *(node.stream for node in graph.nodes.values())])
    streams = tuple(declared.get(name, Stream(name)) for name in names)
    groups: dict[Group, int] = {}
    for node in graph.nodes.values():
        if isinstance(node, Comm | Read):
            groups.setdefault(node.group, len(groups))
    number = {stream.name: index for index, stream in enumerate(streams)}
    classes = tuple(
        _Emitter(graph, by_slice[at], number, groups).rank_class(at) for at in sorted(by_slice)
    )
    return classes, streams, tuple(groups)


class _Emitter:
    """The slots and tasks of one class."""

    def __init__(
        self, graph: Graph, nodes: list[Node], streams: dict[str, int], groups: dict[Group, int]
    ) -> None:
        self.graph = graph
        self.nodes = nodes
        self.streams = streams
        self.groups = groups
        self.slots: list[Slot] = []
        self.slot_of: dict[str, int] = {}
        self.started: set[str] = set()  # sums that some task has begun
        self.position = {node.name: index for index, node in enumerate(nodes)}

    def rank_class(self, at: Slice) -> RankClass:
        drafts = [self._task(node) for node in self.nodes]
        frees = self._frees(drafts)
        after = self._dependencies(drafts, frees)
        reads = {i for i, task in enumerate(drafts) if task.kind == "read"}
        waits = waits_of([task.stream for task in drafts], after, reads)
        tasks = tuple(
            msgspec.structs.replace(task, waits=waits[i], frees=tuple(frees.get(i, ())))
            for i, task in enumerate(drafts)
        )
        return RankClass(at, tuple(self.slots), tasks, self._results(at))

    def _results(self, at: Slice) -> dict[str, int]:
        found: dict[str, int] = {}
        for what in ("loss", "count"):
            for name in (f"${what}@{at}", f"$sum.{what}@{at}"):
                if name in self.slot_of:
                    found.setdefault(what, self.slot_of[name])
        return found

    def _task(self, node: Node) -> Task:
        common = {
            "name": node.name,
            "stream": self.streams[node.stream],
            "reads": tuple(self._slot(name) for name in node.inputs if not self._wire(name)),
            "origin": node.origin,
        }
        if isinstance(node, Comm) and node.in_place:
            for before, after in zip(node.inputs, node.outputs, strict=True):
                self.slot_of[after] = self._slot(before)
        writes = tuple(self._slot(name) for name in node.outputs if not self._wire(name))
        match node:
            case Chunk():
                return Task(kind="run", writes=writes, body=node.body, **common)  # type: ignore[arg-type]
            case Accumulate():
                first = tuple(name not in self.started for name in node.outputs)
                self.started.update(node.outputs)
                return Task(kind="add", writes=writes, first=first, **common)  # type: ignore[arg-type]
            case Read():
                group = self.groups[node.group]
                return Task(kind="read", writes=writes, group=group, **common)  # type: ignore[arg-type]
            case Update():
                params = tuple(self._slot(name) for name in node.params)
                return Task(kind="update", writes=params, count=node.count, **common)  # type: ignore[arg-type]
            case Comm():
                kind: TaskKind = _kind(node)
                group = self.groups[node.group]
                return Task(
                    kind=kind,
                    writes=writes,
                    group=group,
                    key=node.key,
                    reverse=node.reverse,
                    **common,  # type: ignore[arg-type]
                )

    def _wire(self, name: str) -> bool:
        return self.graph.values[name].role == "wire"

    def _slot(self, name: str) -> int:
        if name not in self.slot_of:
            self.slot_of[name] = len(self.slots)
            self.slots.append(self._new_slot(self.graph.values[name]))
        return self.slot_of[name]

    def _new_slot(self, value: Value) -> Slot:
        split_over = tuple(axis for axis, layout in value.layout if layout == "split(0)")
        kind: SlotKind
        if value.role in ("param", "buffer", "batch", "key", "constant"):
            kind = value.role
            source = value.of.partition("[")[0].removeprefix(KEY)
        else:
            kind = {"sum": "sum", "splits": "host"}.get(value.role, "temp")  # type: ignore[assignment]
            source = ""
            owner = self.graph.values.get(value.of)
            if kind == "sum" and owner is not None and owner.role == "param":
                kind, source = "grad", owner.of
        return Slot(
            name=value.name,
            kind=kind,
            shape=value.shape,
            dtype=value.dtype,
            source=source,
            microbatch=_microbatch(self.graph, value.of) if kind in ("batch", "key") else 0,
            split_over=split_over if kind in ("param", "grad") else (),
            bound=value.bound,
        )

    def _frees(self, tasks: list[Task]) -> dict[int, list[int]]:
        """Task -> slots that nobody touches after it in dispatch order."""
        last: dict[int, int] = {}
        for index, task in enumerate(tasks):
            for slot in (*task.reads, *task.writes):
                last[slot] = index
        keep = set(self._results(self.nodes[0].slice or Slice()).values())
        found: dict[int, list[int]] = defaultdict(list)
        for slot, index in last.items():
            if self.slots[slot].kind not in _PERSISTENT and slot not in keep:
                found[index].append(slot)
        return found

    def _dependencies(self, tasks: list[Task], frees: dict[int, list[int]]) -> list[set[int]]:
        """Task -> earlier tasks that must be complete: whatever it reads, overwrites or frees."""
        writer: dict[int, int] = {}  # slot -> the last task that wrote it
        readers: dict[int, list[int]] = defaultdict(list)  # slot -> tasks that read it since
        found: list[set[int]] = []
        for index, task in enumerate(tasks):
            after = {writer[slot] for slot in task.reads if slot in writer}
            for slot in (*task.writes, *frees.get(index, ())):
                after.update(readers[slot])
                if slot in writer:
                    after.add(writer[slot])
            after.discard(index)
            found.append(after)
            for slot in task.reads:
                readers[slot].append(index)
            for slot in task.writes:
                writer[slot] = index
                readers[slot] = []
        for edge in self.graph.edges:
            if edge.before in self.position and edge.after in self.position:
                found[self.position[edge.after]].add(self.position[edge.before])
        return found


def _kind(node: Comm) -> TaskKind:
    if node.comm in ("reduce_scatter", "all_gather"):
        raise PlanError(f"{node.name}: {node.comm} is not supported yet")
    return node.comm  # type: ignore[return-value]


def _microbatch(graph: Graph, name: str) -> int:
    """The microbatch that a Value such as `batch.x[DIR=0,MB=3]` belongs to."""
    text = name.partition("[")[2].rstrip("]")
    tags = dict(word.split("=") for word in text.split(",") if word)
    index = 0
    for split in graph.splits:
        index = index * split.num + int(tags.get(split.tag, 0))
    return index
