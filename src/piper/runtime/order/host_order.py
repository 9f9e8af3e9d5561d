"""HostOrder: a Worker's tasks on the CPU, in dispatch order, with communication going on beside them.

There a chunk holds the host until it is over, so messages start as soon as the plan lets them: one that
stands behind a chunk it need not wait for would keep its peer waiting.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Task
from piper.runtime.failure.board import NOTHING, TASK, WAITS
from piper.runtime.transport.transport import Pending
from piper.runtime.worker.storages import out_of_memory

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker


class PeerError(Exception):
    """A communication broke off, most likely because a peer is gone."""

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(f"{task} broke off: {reason}")


class HostOrder:
    """The host starts every task, and ends a communication when a later task waits for it."""

    def __init__(self, worker: Worker) -> None:
        tasks = worker.me.tasks
        self.worker = worker
        self.cells = worker.cells
        self.names = [task.name for task in tasks]
        self.talks = [_talks(task) for task in tasks]
        self.frees = [task.frees for task in tasks]
        # Communication under way, per stream.
        self.queues: list[deque[tuple[int, Pending]]] = [deque() for _ in worker.plan.streams]
        before = _finished_before(tasks, worker.me.slots)
        self.table = [
            (
                i,
                worker.starts[i],
                tuple((tasks[other].stream, other) for other in before[i]),
                self.queues[tasks[i].stream],
                tasks[i].frees,
            )
            for i in _messages_early(tasks, before)
        ]

    @contextlib.contextmanager
    def home(self) -> Iterator[None]:
        yield

    def run(self) -> None:
        """All tasks of a step."""
        try:
            self._run()
        except RuntimeError as error:
            index = self.cells[WAITS] if self.cells[WAITS] >= 0 else self.cells[TASK]
            if not self.talks[index] or out_of_memory(error):
                raise
            raise PeerError(self.names[index], str(error)) from error

    def _run(self) -> None:
        cells, free = self.cells, self.worker.free
        for index, start, before, queue, frees in self.table:
            cells[TASK] = index
            for stream, last in before:
                self._finish(self.queues[stream], last)
            pending = start()
            if pending is None:
                for slot in frees:
                    free(slot)
                continue
            while queue and queue[0][1].ready():
                self._finish(queue, queue[0][0])
            queue.append((index, pending))
        for queue in self.queues:
            self._finish(queue, len(self.table))
        cells[TASK] = len(self.table)

    def look(self) -> None:
        """Nothing to note: the host itself waits, and says for what."""

    def _finish(self, queue: deque[tuple[int, Pending]], last: int) -> None:
        """Finish a stream's communications up to task `last`: a stream is in order."""
        while queue and queue[0][0] <= last:
            index, pending = queue.popleft()
            self.cells[WAITS] = index
            self.worker.write(index, pending.finish())
            self.cells[WAITS] = NOTHING
            for slot in self.frees[index]:
                self.worker.free(slot)


def _talks(task: Task) -> bool:
    return isinstance(task, Comm)


def _finished_before(tasks: Sequence[Task], slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    """Per task, the communications that must be finished first: its waits, and earlier ones of its own
    stream that touch the same memory (a stream runs in order, so that the plan has no wait for them)."""
    found: list[tuple[int, ...]] = []
    touched: dict[tuple[int, str, int], int] = {}  # stream and memory -> last communication
    for index, task in enumerate(tasks):
        places = []
        for slot in (*task.reads, *task.writes, *task.frees):
            pool = slots[slot].pool
            places.append((task.stream, *(("pool", pool) if pool >= 0 else ("slot", slot))))
        own = [touched[place] for place in places if place in touched]
        found.append(tuple(dict.fromkeys((*task.waits, *own))))
        if _talks(task):
            touched.update(dict.fromkeys(places, index))
    return found


def _messages_early(tasks: Sequence[Task], before: Sequence[tuple[int, ...]]) -> list[int]:
    """The order of dispatch with each message right behind the last task that it waits for. Streams keep
    their order, what the host reads is before all that follows, as the plan takes for granted, and a
    task that would hold the host until some communication ends stays in its place."""
    place: list[tuple[int, int, int]] = []  # per task: behind which, and the order there
    last: dict[int, int] = {}  # stream -> behind which task its latest one comes
    read = -1
    for index, task in enumerate(tasks):
        behind = index
        if task.blocks:
            read = index
        message = isinstance(task, Comm) and task.facts.is_message
        if message and not any(_talks(tasks[i]) for i in before[index]):
            behind = max(read, last.get(task.stream, -1), *before[index])
        place.append((behind, behind != index, index))
        last[task.stream] = behind
    return sorted(range(len(tasks)), key=place.__getitem__)
