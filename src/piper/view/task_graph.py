"""Task graph: a plan in; its tasks without their microbatches as nodes, and what flows between them as
edges, out. All microbatches take the same way: a node counts them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import msgspec

from piper.directives.order import Order
from piper.ir.nodes import Tags
from piper.ir.select import ANY, Selector
from piper.observe.pictures.styles import STYLES, style_of
from piper.observe.timeline import MICROBATCH
from piper.plan.local_order import Local
from piper.plan.report.task_labels import ClassLabels
from piper.plan.tasks import Add, Comm, Run
from piper.plan.types import Plan

_MICROBATCH = re.compile(rf",?{MICROBATCH}=\d+,?")


class GraphNode(msgspec.Struct, frozen=True):
    """Tasks that differ in their microbatch only: of a class, with the directive that made them."""

    name: str
    kind: str
    phase: str
    at: str
    stream: str
    origin: int
    style: str
    num: int
    nbytes: int
    tags: Tags
    communicates: bool


class GraphEdge(msgspec.Struct, frozen=True, array_like=True):
    """So many times a task of the second node reads what one of the first left: so many bytes."""

    source: int
    target: int
    num: int
    nbytes: int


class TaskGraph(msgspec.Struct, frozen=True):
    nodes: list[GraphNode]
    edges: list[GraphEdge]
    selected: list[list[int]]  # per directive, the nodes that its selector names


class _Counted:
    def __init__(self, first: GraphNode) -> None:
        self.first = first
        self.num = 0
        self.nbytes = 0


def task_graph(plan: Plan, locals: list[Local]) -> TaskGraph:
    found: dict[tuple[str, str], _Counted] = {}
    numbers: dict[tuple[str, str], int] = {}
    edges: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    ends: dict[str, list[tuple[int, bool, int]]] = defaultdict(list)
    for part, local in zip(plan.classes, locals, strict=True):
        labels = ClassLabels(plan, part).of_class
        at = str(part.slice)
        nodes = []
        for task, label in zip(part.tasks, labels, strict=True):
            name = without_microbatch(task.name)
            key = at, name
            number = numbers.setdefault(key, len(numbers))
            if key not in found:
                tags = tuple(tag for tag in task.tags if tag[0] != MICROBATCH)
                style = next(k for k, style in STYLES.items() if style is style_of(label))
                phase = task.phase if isinstance(task, Run) else ""
                found[key] = _Counted(
                    GraphNode(
                        name, task.kind, phase, at, label.stream, task.origin, style, 0, 0, tags,
                        label.communicates,
                    )
                )  # fmt: skip
            found[key].num += 1
            found[key].nbytes += label.nbytes
            nodes.append(number)
            if isinstance(task, Comm) and task.key:
                ends[task.key].append((number, task.facts.receives, label.nbytes))
        for index, task in enumerate(part.tasks):
            slots = (*task.reads, *(task.writes if isinstance(task, Add) else ()))
            for slot in dict.fromkeys(slots):
                writer = local.writer_before(slot, index)
                if writer >= 0 and nodes[writer] != nodes[index]:
                    edge = nodes[writer], nodes[index]
                    edges[edge] += 1
                    sizes[edge] += part.slots[slot].type.nbytes
    for members in ends.values():
        for source, receives, nbytes in members:
            for target in (n for n, other, _ in members if other and not receives):
                edges[source, target] += 1
                sizes[source, target] += nbytes
    nodes_ = [
        msgspec.structs.replace(each.first, num=each.num, nbytes=each.nbytes)
        for each in found.values()
    ]
    return TaskGraph(
        nodes_,
        [GraphEdge(*edge, num, sizes[edge]) for edge, num in sorted(edges.items())],
        [_selected(record.directive, nodes_) for record in plan.history],
    )


def without_microbatch(name: str) -> str:
    """`F[PP=2]` of `F[PP=2,MB=0]`."""
    return _MICROBATCH.sub("", name).replace("[]", "")


def _selected(directive: object, nodes: list[GraphNode]) -> list[int]:
    """The chunks that a directive is about."""
    selector = getattr(directive, "selector", None)
    if isinstance(directive, Order):
        selector = Selector()
    if not isinstance(selector, Selector):
        return []
    return [i for i, node in enumerate(nodes) if node.phase and _matches(selector, node)]


def _matches(selector: Selector, node: GraphNode) -> bool:
    """Of any microbatch."""
    if selector.comm or selector.phase not in (None, node.phase):
        return False
    tags = dict(node.tags)
    for tag, wanted in selector.tags:
        value = tags.get(tag)
        if tag != MICROBATCH and ((value is None) if wanted == ANY else (value != wanted)):
            return False
    return True
