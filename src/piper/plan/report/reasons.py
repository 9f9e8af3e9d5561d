"""Why one task comes after another: a class of ranks and two of its tasks in, words out."""

from __future__ import annotations

from collections import defaultdict

from piper.plan.tasks import Add, Comm
from piper.plan.types import RankClass

ORDER = "an order asks for it"
HELD = "it is held back until then, so that little memory is in use at once"
LAST = "what is only reported comes last, so that it takes no room from chunks while it waits"
_SHOWN = 3


class Reasons:
    """The slots of a class with who writes and reads them, in dispatch order."""

    def __init__(self, found: RankClass) -> None:
        self.found = found
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for index, task in enumerate(found.tasks):
            for slot in task.writes:
                self.writers[self._root(slot)].append(index)
            for slot in task.reads:
                self.readers[self._root(slot)].append(index)

    def _root(self, slot: int) -> int:
        """The slot whose memory another one shows."""
        while self.found.slots[slot].base >= 0:
            slot = self.found.slots[slot].base
        return slot

    def needed(self, index: int) -> list[int]:
        """Earlier tasks whose results a task reads or adds to."""
        task = self.found.tasks[index]
        slots = dict.fromkeys((*task.reads, *(task.writes if isinstance(task, Add) else ())))
        last = {self._last_writer(slot, index) for slot in slots}
        return sorted(last - {-1})

    def why(self, before: int, after: int) -> str:
        """What of `before` makes `after` come later."""
        task = self.found.tasks[after]
        reads = [s for s in dict.fromkeys(task.reads) if self._last_writer(s, after) == before]
        words = [f"reads its result {self._names(reads)}"] if reads else []
        adds = [s for s in task.writes if self._last_writer(s, after) == before and s not in reads]
        if adds:
            verb = "adds to" if isinstance(task, Add) else "writes again"
            words.append(f"{verb} its result {self._names(adds)}")
        written = [s for s in task.writes if before in self.readers[self._root(s)]]
        if written:
            words.append(f"overwrites {self._names(written)}, which it reads")
        freed = [s for s in task.frees if before in (*self.readers[s], *self.writers[s])]
        freed = [s for s in freed if s not in reads]
        if freed:
            words.append(f"frees {self._names(freed)}, which it uses")
        taken = {self.found.slots[s].pool for s in task.writes} - {-1}
        left = [s for s in self.found.tasks[before].frees if self.found.slots[s].pool in taken]
        if left:
            words.append(f"takes the buffer of {self._names(left)}, which it frees")
        return "; ".join(words) or self._unseen(before, after)

    def _unseen(self, before: int, after: int) -> str:
        """Why a task waits for one of whose slots it has none."""
        earlier, task = self.found.tasks[before], self.found.tasks[after]
        if isinstance(earlier, Comm) and earlier.facts.sums and not earlier.facts.of_a_step:
            return HELD  # a reduction within the step makes room for the next sum
        if not isinstance(task, Comm):
            return ORDER
        if task.facts.paced:
            return HELD
        return LAST if task.facts.of_a_step and self._only_reported(after) else ORDER

    def _only_reported(self, index: int) -> bool:
        return not any(self.readers[self._root(s)] for s in self.found.tasks[index].writes)

    def _last_writer(self, slot: int, index: int) -> int:
        return max((w for w in self.writers[self._root(slot)] if w < index), default=-1)

    def _names(self, slots: list[int]) -> str:
        names = [self.found.slots[slot].name for slot in slots]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more
