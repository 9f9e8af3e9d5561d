"""Faults around the casts of sums for the wire and back, planted in good plans: see faults.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piper.plan.types import Plan, RankClass
from tests.faults import (
    Fault,
    Plant,
    changed,
    each,
    fault,
    moved,
    permuted,
    shifted,
    with_tasks,
    without,
)


def _casts(plan: Plan) -> Iterator[tuple[int, RankClass, int, Any]]:
    """Where a sum is cast for the wire."""
    for number, part, index, task in each(plan, "add"):
        slot = part.slots[task.sums[0]]
        if slot.kind == "sum" and slot.bucket >= 0 and not task.offsets and task.terms:
            yield number, part, index, task


def cast_too_early(plan: Plan) -> Iterator[Fault]:
    """The last add to a sum comes after its cast for the wire."""
    for number, part, index, task in _casts(plan):
        adds = [i for i in range(index) if task.terms[0] in part.tasks[i].writes]
        if len(adds) < 2 or any(part.tasks[adds[-1]].first) or task.waits:
            continue
        tasks = permuted(part.tasks, moved(part.tasks, index, adds[-1]))
        cast, add = adds[-1], adds[-1] + 1
        freed = tuple(slot for slot in task.frees if slot in task.terms)
        tasks[cast] = msgspec.structs.replace(
            tasks[cast], frees=tuple(slot for slot in task.frees if slot not in freed)
        )
        tasks[add] = msgspec.structs.replace(tasks[add], frees=(*tasks[add].frees, *freed))
        yield fault(with_tasks(plan, number, tasks), "updates", tasks[add].name)


def cast_twice(plan: Plan) -> Iterator[Fault]:
    """What goes over the wire is twice the sum."""
    for number, part, index, task in _casts(plan):
        order = list(range(len(part.tasks)))
        order.insert(index + 1, index)
        tasks = [
            msgspec.structs.replace(part.tasks[i], waits=shifted(part.tasks[i], index))
            for i in order
        ]
        tasks[index] = msgspec.structs.replace(tasks[index], frees=())
        tasks[index + 1] = msgspec.structs.replace(tasks[index + 1], first=(False,))
        yield fault(with_tasks(plan, number, tasks), "updates", task.name)


def _cast_back(plan: Plan) -> Iterator[tuple[int, RankClass, int, Any, int]]:
    """Where the reduced sum comes from the wire, and the reduction."""
    for number, part, index, task in each(plan, "add"):
        makers = [i for i in range(index) if set(task.terms) & set(part.tasks[i].writes)]
        sums = [i for i in makers[-1:] if part.tasks[i].kind in ("all_reduce", "reduce_scatter")]
        if part.slots[task.sums[0]].kind == "grad" and sums:
            yield number, part, index, task, sums[0]


def skipped_reduction(plan: Plan) -> Iterator[Fault]:
    """A sum comes back from its cast as it went."""
    for number, part, index, task, by in _cast_back(plan):
        comm = part.tasks[by]
        if comm.kind != "all_reduce":
            continue
        tasks = list(part.tasks)
        frees = tuple(comm.source if slot in task.terms else slot for slot in task.frees)
        tasks[index] = msgspec.structs.replace(task, terms=(comm.source,), frees=frees)
        changes = with_tasks(plan, number, without(tuple(tasks), by))
        update = next(t for t in tasks if t.kind == "update" and t.gradient == task.sums[0])
        yield fault(changes, "updates collectives", update.name, comm.name)


def added_to_its_own(plan: Plan) -> Iterator[Fault]:
    """What all ranks have summed is added to what a rank has."""
    for number, part, index, task, by in _cast_back(plan):
        if part.tasks[by].kind == "all_reduce":
            changes = changed(plan, number, index, first=(False,))
            yield fault(changes, "updates", task.name)


def reduced_without_cast(plan: Plan) -> Iterator[Fault]:
    """A reduction takes the sum itself, and not its cast."""
    for number, part, index, task in _casts(plan):
        (reader,) = (i for i, t in enumerate(part.tasks) if task.sums[0] in t.reads)
        comm = part.tasks[reader]
        tasks = list(part.tasks)
        tasks[reader] = msgspec.structs.replace(
            comm,
            source=task.terms[0],
            frees=tuple(
                task.terms[0] if slot in task.sums and slot in task.frees else slot
                for slot in comm.frees
                if slot not in task.sums or task.terms[0] in task.frees
            ),
        )
        left = without(tuple(tasks), index)
        yield fault(with_tasks(plan, number, left), "collectives updates memory", comm.name)


CAST_FAULTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        cast_too_early, cast_twice, skipped_reduction, added_to_its_own, reduced_without_cast
    )
}  # fmt: skip
