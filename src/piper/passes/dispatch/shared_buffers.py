"""pools: a class's slots and tasks in; which slots take turns in one buffer, in which order, out."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, islice

from piper.passes.dispatch.pace import RECEIVE_AHEAD
from piper.plan.memory_use import memory_use
from piper.plan.report.summary import slot_bytes
from piper.plan.slots import POOLED, Slot
from piper.plan.tasks import Comm, Run, Task

_TRIED = 8  # free buffers of a size that are looked at, those that were freed first


def share_buffers(
    slots: Sequence[Slot],
    tasks: Sequence[Task],
    frees: Mapping[int, Sequence[int]],
    after: Sequence[set[int]],
    *,
    keep: Collection[int],
) -> dict[int, int]:
    """Slot -> number of its buffer, for what communication writes; `keep` are read after a step.

    Such memory passes from stream to stream in no order that an allocator could see, so that its turns
    are planned: a communication that writes a buffer comes `after` the task that freed it. It takes
    one only if it comes after that task anyway, or could still start `RECEIVE_AHEAD` chunks before its
    result is read; else it gets a new one. Steps follow each other: each may use all buffers again.
    """
    chosen = _written_by_communication(slots, tasks, frees) - set(keep)
    first_read = _first_reads(tasks, chosen)
    chunks = list(accumulate(isinstance(task, Run) for task in tasks))  # dispatched up to each task
    use = memory_use(slots, tasks)
    free: dict[tuple[int, str], deque[tuple[int, int]]] = defaultdict(deque)  # buffer, freed by
    buffers: dict[int, int] = {}
    num_buffers = 0
    for index, task in enumerate(tasks):
        for slot in task.writes:
            if slot not in chosen:
                continue
            latest = chunks[first_read[slot] - 1] - RECEIVE_AHEAD
            ends = [(tasks[b].stream, b) for b in after[index]] + [(task.stream, index)]
            alike = free[slot_bytes(slots[slot]), use[slot]]
            for place, (buffer, by) in enumerate(islice(alike, _TRIED)):
                sure = any(stream == tasks[by].stream and by <= end for stream, end in ends)
                if sure or chunks[by] <= latest:
                    del alike[place]
                    after[index].add(by)
                    buffers[slot] = buffer
                    break
            else:
                buffers[slot] = num_buffers
                num_buffers += 1
        for slot in frees.get(index, ()):
            if slot in buffers:
                free[slot_bytes(slots[slot]), use[slot]].append((buffers[slot], index))
    return buffers


def _written_by_communication(
    slots: Sequence[Slot], tasks: Sequence[Task], frees: Mapping[int, Sequence[int]]
) -> set[int]:
    """Slots of a step, of fixed size, that one communication writes and no other one touches.

    A communication that reads a slot may keep it for longer than any event says: a send does.
    """
    wrote: Counter[int] = Counter()
    found: set[int] = set()
    others: set[int] = {slot.base for slot in slots}
    for index, task in enumerate(tasks):
        wrote.update(task.writes)
        if isinstance(task, Comm):
            found.update(task.writes)
            others.update(task.reads, frees.get(index, ()))
    return {
        index
        for index in found - others
        if wrote[index] == 1
        and slots[index].kind in POOLED
        and slots[index].base < 0
        and slots[index].bound is None
        and slot_bytes(slots[index]) > 0
    }


def _first_reads(tasks: Sequence[Task], slots: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for index, task in enumerate(tasks):
        for slot in task.reads:
            if slot in slots:
                found.setdefault(slot, index)
    return found
