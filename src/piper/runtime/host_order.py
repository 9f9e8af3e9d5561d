"""HostOrder: a Worker's tasks on the CPU, in dispatch order, with communication going on beside them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from piper.plan.types import Task
from piper.runtime.board import NOTHING, TASK, WAITS
from piper.runtime.storages import out_of_memory
from piper.runtime.transport import Pending

if TYPE_CHECKING:
    from piper.runtime.worker import Worker


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
        self.talks = [task.group >= 0 and task.kind != "read" for task in tasks]
        self.frees = [task.frees for task in tasks]
        # Communication under way, per stream.
        self.queues: list[deque[tuple[int, Pending]]] = [deque() for _ in worker.plan.streams]
        self.table = [
            (
                start,
                tuple((tasks[i].stream, i) for i in before),
                self.queues[task.stream],
                task.frees,
            )
            for start, before, task in zip(
                worker.starts, _finished_before(tasks), tasks, strict=True
            )
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
        for index, (start, before, queue, frees) in enumerate(self.table):
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


def _finished_before(tasks: tuple[Task, ...]) -> list[tuple[int, ...]]:
    """Per task, the communications that must be finished first: its waits, and earlier ones of its own
    stream that touch the same slots (a stream runs in order, so that the plan has no wait for them)."""
    found: list[tuple[int, ...]] = []
    touched: dict[tuple[int, int], int] = {}  # (stream, slot) -> last communication
    for index, task in enumerate(tasks):
        slots = (*task.reads, *task.writes, *task.frees)
        own = [touched[task.stream, s] for s in slots if (task.stream, s) in touched]
        found.append(tuple(dict.fromkeys((*task.waits, *own))))
        if task.group >= 0 and task.kind != "read":
            for slot in slots:
                touched[task.stream, slot] = index
    return found
