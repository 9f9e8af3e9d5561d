"""Workers of one process in; their tasks run, in any order that streams and waits allow.

The adversary picks a legal order at random, lets a stream starve for long, and overwrites freed memory
with NaN, so that a plan with a missing wait or an early free gives wrong results or is caught here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from piper.errors import RunError
from piper.plan.tasks import sends
from piper.runtime.transport.transport import Pending
from piper.runtime.worker.worker import Worker

Observe = Callable[[Worker], None]


def drive(
    workers: Sequence[Worker], *, adversary: Random | None = None, observe: Observe | None = None
) -> None:
    """Run all tasks of a step. `observe` sees a worker after each thing that it did."""
    engines = [Engine(worker, poison=adversary is not None) for worker in workers]
    favour: dict[tuple[int, int], float] = {}
    patience = 0
    engine = engines[0]
    while True:  # who was able to go on is asked first
        options: Iterator[tuple[Engine, int]] = (
            (e, stream) for e in (engine, *engines) for stream in e.options()
        )
        if adversary is not None:
            known = [(e, stream) for e in engines for stream in e.options()]
            if patience == 0:
                favour = {(e.worker.me.rank, s): adversary.random() for e, s in known}
                patience = adversary.randint(1, 40)
            patience -= 1
            known.sort(key=lambda o: favour.get((o[0].worker.me.rank, o[1]), 0.5))
            options = iter(known)
        chosen = next(options, None)
        if chosen is None:
            break
        engine, stream = chosen
        engine.advance(stream)
        if observe is not None:
            observe(engine.worker)
    stuck = [engine.waiting() for engine in engines if not engine.done]
    if stuck:
        raise RunError("no rank can go on", details=[line for lines in stuck for line in lines])


class Engine:
    """One rank under the engine: its streams as queues, its host dispatching tasks in order."""

    def __init__(self, worker: Worker, *, poison: bool) -> None:
        self.worker = worker
        self.poison = poison
        self.tasks = worker.me.tasks
        self.queues: dict[int, deque[int]] = defaultdict(deque)
        self.complete: set[int] = set()
        self.pending: dict[int, Pending] = {}
        self.sending: dict[int, int] = defaultdict(int)  # slot -> sends of it that are not over
        self.kept: set[int] = set()  # slots that are freed when those are
        self.handed: dict[int, Tensor] = {}  # slot -> what a body was given for good
        self.dispatched = 0
        self._dispatch()

    @property
    def done(self) -> bool:
        return len(self.complete) == len(self.tasks)

    def _dispatch(self) -> None:
        """The host runs ahead until a task makes it read something."""
        while self.dispatched < len(self.tasks):
            task = self.tasks[self.dispatched]
            self.queues[task.stream].append(self.dispatched)
            self.dispatched += 1
            for slot in task.reads if sends(task) else ():
                self.sending[slot] += 1
            if task.blocks:
                return

    def options(self) -> Iterator[int]:
        """The streams that can go on, those whose next task was dispatched first in front."""
        heads = sorted((queue[0], stream) for stream, queue in self.queues.items() if queue)
        return (stream for index, stream in heads if self._can_go_on(index))

    def _can_go_on(self, index: int) -> bool:
        if index in self.pending:
            return self.pending[index].ready()
        return all(before in self.complete for before in self.tasks[index].waits)

    def advance(self, stream: int) -> None:
        index = self.queues[stream][0]
        self._check_reads(index)
        if index not in self.pending:
            self._remember(index)
            pending = self.worker.starts[index]()
            if pending is not None:
                self.pending[index] = pending
                self._poison_buffers(index)
                return
        else:
            self.worker.write(index, self.pending.pop(index).finish())
        self._release(index)
        self.queues[stream].popleft()
        self.complete.add(index)
        if self.tasks[index].blocks:
            self._dispatch()

    def _remember(self, index: int) -> None:
        """What a body is handed, to overwrite it although the worker has it no more."""
        for slot in self.tasks[index].frees if self.poison else ():
            if slot in self.worker.handed:
                self.handed[slot] = self.worker.slots[slot]

    def _poison_buffers(self, index: int) -> None:
        """A communication may write its buffer from its start on, whoever still reads it."""
        for slot in self.tasks[index].writes if self.poison else ():
            if slot in self.worker.pooled:
                tensor = self.worker.pooled[slot]
                tensor.fill_(_poison(tensor.dtype))

    def _check_reads(self, index: int) -> None:
        for slot in self.tasks[index].reads:
            if self.worker.slots[slot] is None:
                raise RunError(
                    f"rank {self.worker.me.rank}: {self.tasks[index].name} reads "
                    f"{self.worker.me.slots[slot].name}, which is not there",
                    details=["it was not written yet, or already freed: a wait is missing"],
                )

    def _release(self, index: int) -> None:
        """Free what a task frees, but not what a send dispatched before it still has to read."""
        task = self.tasks[index]
        for slot in task.reads if sends(task) else ():
            self.sending[slot] -= 1
            if not self.sending[slot] and slot in self.kept:
                self._free(slot)
        for slot in task.frees:
            if self.sending[slot] and self._sent_before(slot, index):
                self.kept.add(slot)
            else:
                self._free(slot)

    def _sent_before(self, slot: int, index: int) -> bool:
        return any(
            sends(task) and slot in task.reads and at not in self.complete
            for at, task in enumerate(self.tasks[:index])
        )

    def _free(self, slot: int) -> None:
        tensor = self.handed.pop(slot, self.worker.slots[slot])
        if self.poison and isinstance(tensor, Tensor):
            tensor.fill_(_poison(tensor.dtype))
        self.worker.free(slot)
        self.kept.discard(slot)

    def waiting(self) -> list[str]:
        lines = []
        for stream, queue in self.queues.items():
            if queue:
                task = self.tasks[queue[0]]
                missing = [self.tasks[w].name for w in task.waits if w not in self.complete]
                name = self.worker.plan.streams[stream].name
                why = f"after {', '.join(missing)}" if missing else "for its peers"
                lines.append(f"rank {self.worker.me.rank} {name}: {task.name} waits {why}")
        return lines


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
