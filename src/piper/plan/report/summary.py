"""Summary: a plan in a few lines, ranks and tasks per class; and the bytes of Values alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from piper.directives.order import Order
from piper.directives.replicate import Replicate
from piper.plan.memory_ledger import planned_load
from piper.plan.slots import PASSING, Slot
from piper.plan.types import Plan, RankClass
from piper.schedules.table import Table

_NAMED = 4  # parameters that a line names


def summarize(plan: Plan[Any]) -> str:
    lines = [
        f"plan {plan.content_hash()}: mesh {plan.mesh}, {plan.mesh.size} ranks, "
        f"{_data_ranks(plan)} x {plan.num_microbatches} microbatches",
        f"{len(plan.bodies)} bodies, {len(plan.streams)} streams, optimizer {_optimizers(plan)}, "
        f"precision {plan.precision}",
    ]
    for record in plan.history:
        order = record.directive
        if isinstance(order, Order) and isinstance(order.groups, Table) and plan.train:
            lines.append(f"schedule {order.groups.name} along {order.axis}")
    lines += [f"{plan.history[each.origin]}: {each}" for each in plan.cadences]
    lines += _without_effect(plan)
    if any(slot.bound is not None for found in plan.classes for slot in found.slots):
        lines.append(f"memory is planned for {planned_load(plan):g} times an even share of rows")
    lines += _cut_tensors(plan)
    lines += [f"gathered along {note}" for note in plan.gathered]
    for found in plan.classes:
        kinds = Counter(task.kind for task in found.tasks)
        ranks = plan.mesh.size_of(plan.mesh.free(found.slice))
        words = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"  {found.slice} ({ranks} ranks): {len(found.tasks)} tasks: {words}")
    return "\n".join(lines)


def _data_ranks(plan: Plan) -> str:
    """`4 data ranks`, and of which axes they are, as experts have some of `parallel(dp=4, ep=2)`."""
    sizes = [(axis, plan.mesh.size_of((axis,))) for axis in plan.data_axes]
    several = any(size > 1 for _, size in sizes[1:])
    made = f" ({' x '.join(f'{axis}={size}' for axis, size in sizes)})" if several else ""
    return f"{plan.num_data_ranks} data ranks{made}"


def _without_effect(plan: Plan) -> Iterator[str]:
    """Directives that ask for ZeRO over one rank, as where a sweep comes down to `dp=1`."""
    for record in plan.history:
        asked = record.directive
        if isinstance(asked, Replicate) and asked.zero:
            axes = (asked.over,) if isinstance(asked.over, str) else asked.over
            if plan.mesh.size_of(axes) == 1:
                sizes = " ".join(f"{axis}=1" for axis in axes)
                yield f"{record}: ZeRO cuts nothing, since {sizes} is one rank"


def _cut_tensors(plan: Plan) -> Iterator[str]:
    """Per axis that shares tensors, how many matrices are cut, and which stay whole."""
    shared = [a for a in plan.mesh.free(plan.classes[0].slice) if a not in plan.data_axes]
    matrices = {n: t for n, t in plan.tensors.items() if len(t.shape) > 1 and not t.buffer}
    for axis in shared if plan.mesh.size > 1 else ():
        if plan.mesh.size_of((axis,)) > 1:
            whole = [n for n, t in matrices.items() if axis not in dict(t.cut)]
            num = len(matrices) - len(whole)
            names = ", ".join(whole[:_NAMED]) + (", ..." if len(whole) > _NAMED else "")
            rest = f"; {len(whole)} whole: {names}" if whole else ""
            yield f"{num} of {len(matrices)} matrices are cut along {axis}{rest}"


def _optimizers(plan: Plan) -> str:
    """`AdamW`, or `Muon, AdamW (2 groups)`."""
    made = Counter((group.number, group.optimizer) for group in plan.param_groups)
    return ", ".join(
        f"{name} ({num} groups)" if num > 1 else name for (_, name), num in made.items()
    )


def peak_bytes(found: RankClass) -> int:
    """The most bytes of Values that are alive at once, in dispatch order, at their bounds."""
    return max((during for _, during, _ in alive_bytes(found)), default=0)


def alive_bytes(found: RankClass) -> Iterator[tuple[int, int, int]]:
    """For each task the bytes of Values that are alive before, during and after it."""
    alive = 0
    seen: set[int] = set()
    for task in found.tasks:
        before = alive
        for slot in task.writes:
            if slot not in seen and found.slots[slot].kind in PASSING:
                seen.add(slot)
                alive += slot_bytes(found.slots[slot])
        during = alive
        for slot in task.frees:
            if slot in seen:
                alive -= slot_bytes(found.slots[slot])
        yield before, during, alive


def slot_bytes(slot: Slot) -> int:
    return slot.type.bound_nbytes
