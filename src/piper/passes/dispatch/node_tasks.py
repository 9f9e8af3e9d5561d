"""Rules: a node of the physical graph in, the Task that stands for it out, one rule per type of node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from piper.errors import PlanError
from piper.ir import nodes as ir
from piper.ir.communication import communication
from piper.ir.graph import Graph
from piper.ir.values import SUMMED
from piper.mesh import Group
from piper.passes.physical.buckets import Bucketed
from piper.plan.tasks import NO_SLOT, Add, Comm, Fold, Norm, Read, Run, Settle, Task, Update


class Numbering:
    """What a rule asks while the tasks of one class are made, in dispatch order."""

    def __init__(
        self,
        graph: Graph,
        bucketed: Bucketed,
        slot: Callable[[str], int],
        groups: dict[Group, int],
        nodes: Sequence[ir.Node],
    ) -> None:
        self.graph = graph
        self.slot = slot
        self.groups = groups
        self._bucketed = bucketed
        self._started: set[tuple[str, int]] = set()  # sums, or parts of them, that a task has begun
        self._touched: set[str] = set()  # sums of buckets that some task has added to
        self._added: dict[str, set[int]] = defaultdict(set)  # and where something is added to each
        for node in nodes:
            if isinstance(node, ir.Accumulate) and graph.values[node.outputs[0]].bucket >= 0:
                self._added[node.outputs[0]].update(node.offsets)

    def slots(self, names: Sequence[str]) -> tuple[int, ...]:
        """Of the Values that lie in memory here."""
        values = self.graph.values
        return tuple(self.slot(name) for name in names if values[name].role != "wire")

    def starts(self, total: str, offset: int) -> bool:
        """Whether this is the first to add to a part of a sum."""
        first = (total, offset) not in self._started
        self._started.add((total, offset))
        return first

    def needs_zeros(self, total: str) -> bool:
        """Whether the first to add to a bucket's sum must fill what no term covers."""
        if total in self._touched:
            return False
        self._touched.add(total)
        value = self.graph.values[total]
        # What lies between parameters is reduced with them, and must be a number.
        between = value.role in SUMMED
        return between or self._added[total] != set(self._bucketed.buckets[value.bucket].offsets)


Rule = Callable[[Any, Numbering, dict[str, Any]], Task]
N = TypeVar("N", bound=Rule)
RULES: dict[type, Rule] = {}


def task_of(node: type) -> Callable[[N], N]:
    """Say how nodes of a type become tasks; the rule gets what all tasks have in common."""

    def add(rule: N) -> N:
        RULES[node] = rule
        return rule

    return add


def make_task(node: Any, at: Numbering, stream: int) -> Task:
    rule = RULES.get(type(node))
    if rule is None:
        kind = type(node).__name__
        raise PlanError(f"{node.name}: no rule makes a task of a {kind}", legal=_legal())
    common = {"name": node.name, "stream": stream, "tags": node.tags, "origin": node.origin}
    return rule(node, at, common)


def _legal() -> str:
    return ", ".join(kind.__name__ for kind in RULES)


@task_of(ir.Chunk)
def _run(node: ir.Chunk, at: Numbering, common: dict[str, Any]) -> Run:
    inputs, outputs = at.slots(node.inputs), at.slots(node.outputs)
    return Run(
        body=node.body,
        phase=node.phase,
        inputs=inputs,
        outputs=outputs,
        leaves=node.leaves,
        sees=node.sees,
        makes=node.makes,
        **common,
    )


@task_of(ir.Fold)
def _fold(node: ir.Fold, at: Numbering, common: dict[str, Any]) -> Fold:
    inputs, outputs = at.slots(node.inputs), at.slots(node.outputs)
    assert inputs[: len(outputs)] == outputs, "a Fold changes buffers in place"
    return Fold(body=node.body, inputs=inputs, outputs=outputs, **common)


@task_of(ir.Accumulate)
def _add(node: ir.Accumulate, at: Numbering, common: dict[str, Any]) -> Add:
    parts = [(name, 0) for name in node.outputs]
    zeros = False
    if node.offsets or not node.inputs:
        (total,) = node.outputs
        parts = [(total, offset) for offset in node.offsets]
        zeros = at.needs_zeros(total)
    return Add(
        terms=at.slots(node.inputs),
        sums=at.slots(node.outputs),
        first=tuple(at.starts(*part) for part in parts),
        offsets=node.offsets,
        zeros=zeros,
        **common,
    )


@task_of(ir.Read)
def _read(node: ir.Read, at: Numbering, common: dict[str, Any]) -> Read:
    sent, received = at.slots(node.inputs)
    (splits,) = at.slots(node.outputs)
    group = at.groups[node.group]
    return Read(sent=sent, received=received, splits=splits, group=group, **common)


@task_of(ir.Norm)
def _norm(node: ir.Norm, at: Numbering, common: dict[str, Any]) -> Norm:
    (gradient,), (squares,) = at.slots(node.inputs), at.slots(node.outputs)
    (weight,) = node.weights
    return Norm(gradient=gradient, squares=squares, weight=weight, **common)


@task_of(ir.Update)
def _update(node: ir.Update, at: Numbering, common: dict[str, Any]) -> Update:
    gradient, *rest = at.slots(node.inputs)
    *stepped, averaged = at.slots(node.outputs)
    assert averaged == gradient, "an Update divides its gradient in place"
    norm = rest.pop() if node.clip is not None else NO_SLOT
    return Update(
        bucket=node.bucket,
        gradient=gradient,
        stepped=tuple(stepped),
        count=node.count,
        counted=rest.pop() if rest else NO_SLOT,
        clip=node.clip,
        norm=norm,
        late=node.late,
        **common,
    )


@task_of(ir.Settle)
def _settle(node: ir.Settle, at: Numbering, common: dict[str, Any]) -> Settle:
    *stepped, gradient = at.slots(node.outputs)
    *rest, norm = at.slots(node.inputs)[len(node.outputs) :]
    return Settle(
        bucket=node.bucket,
        gradient=gradient,
        stepped=tuple(stepped),
        count=node.count,
        counted=rest.pop() if rest else NO_SLOT,
        clip=node.clip,
        norm=norm,
        **common,
    )


@task_of(ir.Comm)
def _comm(node: ir.Comm, at: Numbering, common: dict[str, Any]) -> Comm:
    kind = communication(node.comm)
    sources, targets = at.slots(node.inputs), at.slots(node.outputs)
    source, *splits = sources if kind.brings else (NO_SLOT,)
    target, *_ = targets if kind.leaves else (NO_SLOT,)  # more of them show parts of it
    return Comm(
        comm=node.comm,
        group=at.groups[node.group],
        key=node.key if len(node.group.slices) > 1 else "",
        source=source,
        target=target,
        splits=splits[0] if splits else NO_SLOT,
        reverse=node.reverse,
        **common,
    )
