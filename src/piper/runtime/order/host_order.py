"""HostOrder: a Worker's tasks on the CPU, as the plan dispatches them, communication going on beside."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from piper.plan.held_by import held_by
from piper.plan.tasks import Comm
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
        self.talks = [isinstance(task, Comm) for task in tasks]
        self.frees = [task.frees for task in tasks]
        # Communication under way, per stream.
        self.queues: list[deque[tuple[int, Pending]]] = [deque() for _ in worker.plan.streams]
        holders = held_by(tasks, worker.me.slots)
        self.table = [
            (
                index,
                worker.starts[index],
                tuple((tasks[other].stream, other) for other in holders[index]),
                self.queues[task.stream],
                task.frees,
            )
            for index, task in enumerate(tasks)
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
