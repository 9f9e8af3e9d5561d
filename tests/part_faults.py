"""Faults of gradients that are reduced in the place of a sum: a good plan in, bad ones out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piper.plan.types import Plan, RankClass
from tests.faults import Fault, Plant, changed, each, fault, moved, permuted, shifted, with_tasks


def _in_place(plan: Plan) -> Iterator[tuple[int, RankClass, int, Any]]:
    """Where the rank's part of a sum is reduced in its place."""
    for number, part, index, task in each(plan, "reduce_scatter"):
        if part.slots[task.target].base == task.source:
            yield number, part, index, task


def norm_too_early(plan: Plan) -> Iterator[Fault]:
    """A part is squared before it is reduced, and its reduction waits for that."""
    for number, part, index, task in _in_place(plan):
        for norm, other in enumerate(part.tasks):
            if other.kind == "norm" and task.target in other.reads:
                order = moved(part.tasks, norm, index)
                waits = tuple(w for w in other.waits if w < index)
                tasks = list(part.tasks)
                tasks[norm] = msgspec.structs.replace(other, waits=(*waits, *task.waits))
                tasks[index] = msgspec.structs.replace(task, waits=(*task.waits, norm))
                for i, t in enumerate(tasks):  # nobody else comes earlier than before
                    if i > index and i != norm and task.target in t.reads:
                        known = {w for w in (index, *other.waits, *t.waits) if w < i}
                        tasks[i] = msgspec.structs.replace(t, waits=tuple(sorted(known)))
                changes = with_tasks(plan, number, permuted(tuple(tasks), order))
                yield fault(changes, "updates", other.name)


def reduced_from_another(plan: Plan) -> Iterator[Fault]:
    """The part of one sum is filled from another one."""
    for number, part, index, task in _in_place(plan):
        for other, slot in enumerate(part.slots):
            if other != task.source and slot.kind == "unreduced":
                yield fault(changed(plan, number, index, source=other), "structure", task.name)


def reduced_elsewhere(plan: Plan) -> Iterator[Fault]:
    """What is reduced takes the place of the whole sum's first part, whatever the rank."""
    for number, _, index, task in _in_place(plan):
        yield fault(changed(plan, number, index, target=task.source), "collectives", task.name)


def taken_again(plan: Plan) -> Iterator[Fault]:
    """A sum is read as a whole after the rank's part of it was reduced in it."""
    for number, part, index, task in _in_place(plan):
        for later, other in enumerate(part.tasks[index + 1 :], start=index + 1):
            if other.kind == "run":
                inputs, waits = (*other.inputs, task.source), tuple({*other.waits, index})
                changes = changed(plan, number, later, inputs=inputs, waits=waits)
                yield fault(changes, "updates", other.name)


def made_again(plan: Plan) -> Iterator[Fault]:
    """A sum is made anew in the middle, and what was in it is gone."""
    for number, part, _, task in _in_place(plan):
        adds = [i for i, t in enumerate(part.tasks) if task.source in t.writes and t.kind == "add"]
        for later in adds[1:]:
            changes = changed(plan, number, later, zeros=True)
            yield fault(changes, "updates", part.tasks[later].name)


def never_made(plan: Plan) -> Iterator[Fault]:
    """Nobody makes the memory that a sum is added up in."""
    for number, part, _, task in _in_place(plan):
        first = next(i for i, t in enumerate(part.tasks) if task.source in t.writes)
        changes = changed(plan, number, first, zeros=False)
        yield fault(changes, "updates", part.tasks[first].name)


def reduced_twice(plan: Plan) -> Iterator[Fault]:
    """A whole sum is reduced over the ranks, and so is the part of it."""
    for number, part, index, task in _in_place(plan):
        whole = msgspec.structs.replace(
            task, name=f"{task.name}!", comm="all_reduce", target=task.source, frees=()
        )
        tasks = [
            msgspec.structs.replace(t, waits=shifted(t, index)) if i >= index else t
            for i, t in enumerate(part.tasks)
        ]
        tasks.insert(index, whole)
        yield fault(with_tasks(plan, number, tasks), "updates", whole.name)


PART_FAULTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        norm_too_early, reduced_from_another, reduced_elsewhere, taken_again, made_again, never_made,
        reduced_twice,
    )
}  # fmt: skip
