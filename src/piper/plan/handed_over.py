"""handed_over: a class's tasks and slots in; the slots whose tensors bodies drop early, out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from piper.plan.slots import POOLED, Slot
from piper.plan.tasks import Run, Task, sends


def handed_over(tasks: Sequence[Task], slots: Sequence[Slot]) -> frozenset[int]:
    """Slots that the body which frees them drops at its last use of them.

    A body made the tensor on the stream of the one that frees it: an allocator hands memory out again in
    the order of that stream. The slot shares no memory with another one, and is no buffer of a pool. No
    send reads it: a task that frees what is sent does not wait for the send.
    """
    kept = {slot.base for slot in slots}
    kept.update(slot for task in tasks if sends(task) for slot in task.reads)
    streams: dict[int, int] = {}  # slot -> stream of the bodies that made it, -1 if others did, too
    found: set[int] = set()
    for task in tasks:
        runs = isinstance(task, Run)
        if runs and task.frees:
            times = Counter(task.reads)
            found.update(
                slot
                for slot in task.frees
                if times[slot] == 1 and streams.get(slot) == task.stream and slot not in kept
            )
        for slot in task.writes:
            stream = task.stream if runs else -1
            streams[slot] = stream if streams.get(slot, stream) == stream else -1
    return frozenset(
        i for i in found if slots[i].kind in POOLED and slots[i].pool < 0 and slots[i].base < 0
    )
