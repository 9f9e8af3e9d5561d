"""early_messages: a class of ranks in; the same class with messages dispatched early, for a CPU, out.

There a chunk holds the host until it is over, so messages start as soon as the plan lets them: one that
stands behind a chunk it need not wait for would keep its peer waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.plan.held_by import held_by
from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Task
from piper.plan.types import RankClass


def early_messages(rank_class: RankClass) -> RankClass:
    """Each message right behind the last task that it waits for; waits and groups numbered anew."""
    order = _order(rank_class.tasks, rank_class.slots)
    position = [0] * len(order)
    for index, task in enumerate(order):
        position[task] = index
    tasks = tuple(_renumbered(rank_class.tasks[task], position) for task in order)
    # A group begins and ends with chunks, which keep their order.
    overlaps = tuple(
        tuple(range(position[group[0]], position[group[-1]] + 1)) for group in rank_class.overlaps
    )
    return msgspec.structs.replace(rank_class, tasks=tasks, overlaps=overlaps)


def _renumbered(task: Task, position: Sequence[int]) -> Task:
    waits = tuple(sorted(position[wait] for wait in task.waits))
    return task if waits == task.waits else msgspec.structs.replace(task, waits=waits)


def _order(tasks: Sequence[Task], slots: Sequence[Slot]) -> list[int]:
    """Streams keep their order, a host read is before all that follows it, as waits take for granted,
    and a message that would hold the host until some communication ends stays in its place. One that
    frees what another one reads stays behind it."""
    holders = held_by(tasks, slots)
    place: list[tuple[int, int, int]] = []  # per task: behind which, and the order there
    last: dict[int, int] = {}  # stream -> behind which task its latest one comes
    readers: dict[int, int] = {}  # slot -> behind which task its latest reader comes
    read = -1
    for index, task in enumerate(tasks):
        behind = index
        if task.blocks:
            read = index
        message = isinstance(task, Comm) and task.facts.is_message
        if message and not any(isinstance(tasks[i], Comm) for i in holders[index]):
            others = (readers.get(slot, -1) for slot in task.frees)
            behind = max(read, last.get(task.stream, -1), *holders[index], *others)
        place.append((behind, behind != index, index))
        last[task.stream] = behind
        for slot in task.reads:
            readers[slot] = max(behind, readers.get(slot, -1))
    return sorted(range(len(tasks)), key=place.__getitem__)
