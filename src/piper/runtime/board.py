"""Board: where each rank is, in numbers that its process writes and others may read at any time."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

STEP, TASK, WAITS = range(3)  # steps begun; task dispatched last; communication the host waits for
_FIELDS = 4
_BYTES = 8 * _FIELDS
NOTHING = -1


@dataclass(frozen=True)
class Where:
    """One rank's place: in `step`, at `task` (its index), waiting for the end of task `waits` or -1."""

    step: int
    task: int
    waits: int


class Board:
    """A cell per rank: in a file that processes of one machine share, or in this process alone."""

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

    def where(self, rank: int) -> Where:
        step, task, waits = self.cells(rank)[:3]
        return Where(step, task, waits)

    def snapshot(self) -> tuple[Where, ...]:
        return tuple(self.where(rank) for rank in range(self.num_ranks))

    def clear(self) -> None:
        """Nobody has begun anything."""
        for rank in range(self.num_ranks):
            clear(self.cells(rank))


def clear(cells: memoryview) -> None:
    cells[STEP], cells[TASK], cells[WAITS] = 0, NOTHING, NOTHING
