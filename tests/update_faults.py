"""Faults of what updates write: a good plan in, bad ones out."""

from __future__ import annotations

from collections.abc import Iterator

from piper.plan.local_order import Local
from piper.plan.types import Plan
from tests.faults import Fault, Plant, changed, each, fault


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


UPDATE_FAULTS: dict[str, Plant] = {read_after_update.__name__: read_after_update}
