"""Local: one list of tasks in; what is complete when a task starts, and which slots overlap, out."""

from __future__ import annotations

import bisect
import math
from functools import cached_property

from piper.plan.handed_over import handed_over
from piper.plan.memory_use import Use, memory_use
from piper.plan.slots import PARTS, Slot
from piper.plan.tasks import Task


class Local:
    """What one dispatch order says by itself, whatever other ranks do."""

    def __init__(self, tasks: tuple[Task, ...], slots: tuple[Slot, ...]) -> None:
        self.tasks = tasks
        self.slots = slots
        numbers: dict[int, int] = {}
        self.stream = [numbers.setdefault(task.stream, len(numbers)) for task in tasks]
        self.num_streams = len(numbers)

    @cached_property
    def before(self) -> list[list[int]]:
        """Per task and stream, the last task that is surely complete when it starts.

        A stream runs in dispatch order; a wait brings what the awaited task had waited for; nothing
        is dispatched before a host read is complete.
        """
        known = [[-1] * self.num_streams for _ in range(self.num_streams)]
        found: list[list[int]] = []
        for index, (task, stream) in enumerate(zip(self.tasks, self.stream, strict=True)):
            mine = known[stream]
            for wait in task.waits:
                other = self.stream[wait]
                if wait < index and mine[other] < wait:
                    for at, last in enumerate(found[wait]):
                        if last > mine[at]:
                            mine[at] = last
                    mine[other] = wait
            found.append(mine[:])
            mine[stream] = index
            if task.blocks:
                for clock in known:
                    clock[:] = map(max, clock, mine)
        return found

    def ordered(self, first: int, second: int) -> bool:
        """Whether task `first` is surely complete when `second` starts."""
        return self.before[second][self.stream[first]] >= first

    @cached_property
    def root(self) -> list[int]:
        """Per slot, the slot whose memory it shows."""
        found = []
        for index, slot in enumerate(self.slots):
            at = index
            while slot.base >= 0:
                at, slot = slot.base, self.slots[slot.base]
            found.append(at)
        return found

    @cached_property
    def use(self) -> list[Use]:
        """Per slot, what its memory is for."""
        return memory_use(self.slots, self.tasks)

    @cached_property
    def handed(self) -> frozenset[int]:
        """Slots whose tensors a body drops at its last use of them."""
        return handed_over(self.tasks, self.slots)

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """Root -> all tasks that write it or a part of it, in dispatch order."""
        return self._users([task.writes for task in self.tasks])

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Root -> all tasks that read it or a part of it, in dispatch order."""
        return self._users([task.reads for task in self.tasks])

    def written_by(self, slot: int) -> list[int]:
        """All tasks that write just this slot, in dispatch order."""
        writers = self.writers.get(self.root[slot], [])
        return [index for index in writers if slot in self.tasks[index].writes]

    def _users(self, used: list[tuple[int, ...]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, slots in enumerate(used):
            for root in {self.root[slot] for slot in slots}:
                found.setdefault(root, []).append(index)
        return found

    def writer_before(self, slot: int, index: int) -> int:
        """The last task dispatched before `index` that writes a slot; -1 if none does."""
        writers = self.writers.get(self.root[slot], [])
        at = bisect.bisect_left(writers, index)
        return writers[at - 1] if at else -1

    @cached_property
    def overlaps(self) -> list[tuple[int, ...]]:
        """Per slot, all slots that share memory with it, itself first."""
        views: dict[int, list[int]] = {}
        for index, root in enumerate(self.root):
            if root != index:
                views.setdefault(root, []).append(index)
        found: list[tuple[int, ...]] = []
        for index, root in enumerate(self.root):
            if root not in views:
                found.append((index,))
                continue
            mine = self._range(index)
            near = [i for i in (root, *views[root]) if i != index and _meet(mine, self._range(i))]
            found.append((index, *near))
        return found

    def covers(self, outer: int, inner: int) -> bool:
        """Whether all of slot `inner` lies in `outer`, of the same root."""
        if outer == inner or self.slots[outer].base < 0:
            return True
        one, other = self._range(outer), self._range(inner)
        return one is not None and other is not None and one[0] <= other[0] and other[1] <= one[1]

    def _range(self, index: int) -> tuple[int, int] | None:
        """Elements of the root that a slot shows; None if that differs between ranks."""
        start, slot = 0, self.slots[index]
        size = math.prod(slot.shape)
        while slot.base >= 0:
            if slot.kind in PARTS:
                return None
            start += slot.offset
            slot = self.slots[slot.base]
        return start, start + size


def _meet(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is None or other is None or (one[0] < other[1] and other[0] < one[1])
