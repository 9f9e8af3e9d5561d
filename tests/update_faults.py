"""Faults of updates, of what they divide by and of what they write: a good plan in, bad ones out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.plan.local_order import Local
from piper.plan.types import Plan
from tests.faults import Fault, Plant, changed, each, fault, shifted, with_tasks, without


def dropped_update(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "update"):
        writer = max(i for i, t in enumerate(part.tasks) if task.gradient in t.writes and i < index)
        name = part.tasks[writer].name
        yield fault(with_tasks(plan, number, without(part.tasks, index)), "updates", name)


def doubled_update(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "update"):
        order = list(range(len(part.tasks)))
        order.insert(index + 1, index)
        tasks = [
            msgspec.structs.replace(part.tasks[i], waits=shifted(part.tasks[i], index))
            for i in order
        ]
        yield fault(with_tasks(plan, number, tasks), "updates", task.name)


def unsettled_update(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "settle"):
        update = next(t for t in part.tasks if t.kind == "update" and t.bucket == task.bucket)
        yield fault(with_tasks(plan, number, without(part.tasks, index)), "updates", update.name)


def norm_of_another(plan: Plan) -> Iterator[Fault]:
    """One bucket's gradient counts twice in the norm, another's not at all."""
    for number, part, index, task in each(plan, "norm"):
        for other in part.tasks[:index]:
            if other.kind == "norm":
                changes = changed(plan, number, index, gradient=other.gradient, weight=other.weight)
                yield fault(changes, "updates", task.name)


def wrong_divisor(plan: Plan) -> Iterator[Fault]:
    for number, _, index, task in each(plan, "update", "settle"):
        if task.count is not None:
            changes = changed(plan, number, index, count=task.count / 2)
            yield fault(changes, "updates", task.name)


def misplaced_gradient(plan: Plan) -> Iterator[Fault]:
    """A parameter's gradient is added where another one of its bucket lies."""
    for number, part, index, task in each(plan, "add"):
        sources = [part.slots[slot].source for slot in task.reads]
        if task.offsets and sources != sources[::-1]:
            changes = changed(plan, number, index, offsets=task.offsets[::-1])
            yield fault(changes, "updates", task.name)


def read_after_update(plan: Plan) -> Iterator[Fault]:
    """A chunk waits for all that is done to what an update has stepped, and computes with it."""
    for number, part, index, update in each(plan, "update"):
        local, slot = Local(part.tasks, part.slots), update.stepped[0]
        for later, task in enumerate(part.tasks[index + 1 :], index + 1):
            if task.kind == "run":
                done = [i for i in local.writers[local.root[slot]] if i < later]
                waits = tuple(sorted({*task.waits, *done}))
                read = changed(plan, number, later, inputs=(*task.inputs, slot), waits=waits)
                yield fault(read, "updates", task.name)


UPDATE_FAULTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        dropped_update, doubled_update, unsettled_update, norm_of_another, wrong_divisor,
        misplaced_gradient, read_after_update,
    )
}  # fmt: skip
