"""Board: where each rank is, in numbers that its process writes and others may read at any time."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

# Steps begun of all plans; which plan it is in, by number; steps begun of that plan; the task that was
# dispatched last; the communication that the host waits for; and a pulse of the process itself.
TURN, PLAN, STEP, TASK, WAITS, PULSE = range(6)
_FIELDS = 8
_BYTES = 8 * _FIELDS
NOTHING = -1


@dataclass(frozen=True)
class Where:
    """One rank's place: in step `step` of plan number `plan` (-1 between steps), at `task` (an index; -1
    before the first, their number after the last), waiting for the end of task `waits` or -1.
    `turn` counts the steps of all plans, so that places of two ranks can be compared."""

    turn: int = 0
    plan: int = NOTHING
    step: int = 0
    task: int = NOTHING
    waits: int = NOTHING


class Board:
    """Cells per rank: in a file that processes of one machine share, or in this process alone."""

    def __init__(self, num_ranks: int, path: str | None = None) -> None:
        self.num_ranks = num_ranks
        size = num_ranks * _BYTES
        if path is None:
            self._memory: mmap.mmap | bytearray = bytearray(size)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size < size:
                    os.ftruncate(descriptor, size)
                self._memory = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        self._view = memoryview(self._memory).cast("q")

    def cells(self, rank: int) -> memoryview:
        """The numbers of one rank, to be written by it alone."""
        return self._view[rank * _FIELDS : (rank + 1) * _FIELDS]

    def snapshot(self) -> tuple[Where, ...]:
        return tuple(where(self.cells(rank)) for rank in range(self.num_ranks))

    def pulses(self) -> tuple[int, ...]:
        """A number per rank that changes for as long as its process runs at all."""
        return tuple(self.cells(rank)[PULSE] for rank in range(self.num_ranks))


def where(cells: memoryview) -> Where:
    return Where(cells[TURN], cells[PLAN], cells[STEP], cells[TASK], cells[WAITS])


def clear(cells: memoryview) -> None:
    """Nothing has begun."""
    cells[TURN], cells[STEP] = 0, 0
    cells[PLAN] = cells[TASK] = cells[WAITS] = NOTHING


def begin(cells: memoryview, plan: int) -> None:
    """A step of a plan, by its number."""
    cells[TASK] = cells[WAITS] = NOTHING
    cells[TURN] += 1
    cells[PLAN] = plan


def end(cells: memoryview) -> None:
    """The step is over; whoever fails within one stays where it was."""
    cells[PLAN] = NOTHING
