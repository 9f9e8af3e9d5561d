"""held_by: a class's tasks in; per task, the communications that end before it starts, out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Task


def held_by(tasks: Sequence[Task], slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    """Per task, what must be finished first: its waits, and earlier communications of its own stream
    that touch the same memory (a stream runs in order, so that the plan has no wait for them)."""
    holders: list[tuple[int, ...]] = []
    touched: dict[tuple[int, str, int], int] = {}  # stream and memory -> last communication
    talking: set[int] = set()  # streams with communication so far
    for index, task in enumerate(tasks):
        talks = isinstance(task, Comm)
        if not talks and task.stream not in talking:
            holders.append(task.waits)
            continue
        places = []
        for slot in (*task.reads, *task.writes, *task.frees):
            pool = slots[slot].pool
            places.append((task.stream, *(("pool", pool) if pool >= 0 else ("slot", slot))))
        own = [touched[place] for place in places if place in touched]
        holders.append(tuple(dict.fromkeys((*task.waits, *own))))
        if talks:
            talking.add(task.stream)
            touched.update(dict.fromkeys(places, index))
    return holders
