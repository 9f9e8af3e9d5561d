"""held_by: a class's tasks in; per task, the communications that end before it starts, out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Task


def held_by(tasks: Sequence[Task], slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    """Per task, what must be finished first: its waits, and earlier communications of its own stream
    that touch the same memory (a stream runs in order, so that the plan has no wait for them). What is
    no communication comes behind all that its stream has."""
    holders: list[tuple[int, ...]] = []
    touched: dict[tuple[int, str, int], int] = {}  # stream and memory -> last communication
    talked: dict[int, int] = {}  # stream -> its last communication so far
    for index, task in enumerate(tasks):
        if not isinstance(task, Comm):
            own = [talked[task.stream]] if task.stream in talked else []
            holders.append(tuple(dict.fromkeys((*task.waits, *own))))
            continue
        places = []
        for slot in (*task.reads, *task.writes, *task.frees):
            pool = slots[slot].pool
            places.append((task.stream, *(("pool", pool) if pool >= 0 else ("slot", slot))))
        own = [touched[place] for place in places if place in touched]
        holders.append(tuple(dict.fromkeys((*task.waits, *own))))
        talked[task.stream] = index
        touched.update(dict.fromkeys(places, index))
    return holders
