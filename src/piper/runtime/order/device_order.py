"""DeviceOrder: a Worker's tasks on CUDA streams, ordered by the plan's waits as events."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from piper.plan.tasks import Fold, Meeting, Run, Settle, Task, Update, sends
from piper.runtime.failure.board import NOTHING, TASK, WAITS
from piper.runtime.order.multiprocessors import Multiprocessors
from piper.runtime.order.releases import releases_of

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker

HIGH = -1  # CUDA's number for a high priority
ANY = -1  # of a task that makes no products: as the last one left it
PRODUCTS = (Run, Fold, Update, Settle)  # tasks that may make some


class DeviceOrder:
    """The host dispatches every task to its stream and waits for none, but where a task reads.

    A stream per stream of the plan; an event after each task that a task of another stream waits for.
    Steps follow each other on `home`, the stream of the first body: it joins all others at the end.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.cells = worker.cells
        tasks, device = worker.me.tasks, worker.device
        number = next((task.stream for task in tasks if isinstance(task, Run)), 0)
        used = list(dict.fromkeys([number, *(task.stream for task in tasks)]))
        self.streams = _streams(device, {i: worker.plan.streams[i].priority for i in used})
        self.stream = self.streams[number]
        self.others = [self.streams[i] for i in used if i != number]
        self.begun = torch.cuda.Event()
        self.ended = [torch.cuda.Event() for _ in self.others]
        self.releases = releases_of(worker.me, home=number)
        self.events = _events(tasks)
        self.room = Multiprocessors(device)
        if self.room.problem and any(_leaves(task) > 0 for task in tasks):
            warnings.warn(
                f"products leave no room to communication: {self.room.problem}", stacklevel=2
            )
        self.table = [
            (
                start,
                self.streams[task.stream],
                [self.events[i] for i in task.waits if tasks[i].stream != task.stream],
                self.events.get(index),
                sends(task),
                self.releases.after[index],
                _leaves(task),
            )
            for index, (start, task) in enumerate(zip(worker.starts, tasks, strict=True))
        ]
        self.sent: deque[tuple[Any, Any]] = deque()  # what sends still read, until their event
        torch.cuda.synchronize(device)  # the model was filled on a stream of torch's

    @contextlib.contextmanager
    def home(self) -> Iterator[None]:
        """Run on the stream that the step begins and ends on."""
        with torch.cuda.stream(self.stream):
            yield

    def run(self) -> None:
        """All tasks of a step; the home stream is then behind all of them."""
        cells, worker = self.cells, self.worker
        self.begun.record(self.stream)
        for stream in self.others:
            stream.wait_event(self.begun)
        self.room.leave(0)  # a step that failed, of any plan, may have left something
        current, left = None, 0
        for index, (start, stream, waits, event, sending, frees, leaves) in enumerate(self.table):
            cells[TASK] = index
            if stream is not current:
                torch.cuda.set_stream(stream)
                current = stream
            for before in waits:
                stream.wait_event(before)
            if leaves != left and leaves != ANY:
                self.room.leave(leaves)
                left = leaves
            pending = start()
            if pending is not None:
                worker.write(index, pending.finish())
            if event is not None:
                event.record(stream)
            if sending:
                self._keep(pending, event)
            for slot in frees:
                worker.free(slot)
        self.room.leave(0)
        for stream, ended in zip(self.others, self.ended, strict=True):
            ended.record(stream)
            self.stream.wait_event(ended)
        torch.cuda.set_stream(self.stream)
        for slot in self.releases.last:
            worker.free(slot)
        cells[TASK] = len(self.table)

    def _keep(self, pending: Any, event: Any) -> None:
        """A send's tensor lives until the send is over; whoever frees it does not wait for that."""
        while self.sent and self.sent[0][1].query():
            self.sent.popleft()
        self.sent.append((pending, event))

    def look(self) -> None:
        """Note what the device is waiting for: the first communication that is not over. Called from
        another thread, by somebody who wonders why the step does not end."""
        tasks = self.worker.me.tasks
        last = self.cells[TASK]
        under_way = [i for i, e in self.events.items() if i <= last and not e.query()]
        talking = [i for i in under_way if isinstance(tasks[i], Meeting)]
        self.cells[WAITS] = min(talking or under_way, default=NOTHING)


_made: dict[tuple[torch.device, str], list[Any]] = {}


def _streams(device: torch.device, priorities: Mapping[int, str]) -> dict[int, Any]:
    """A CUDA stream for each. A device has few queues, which streams take in turn: all plans of a
    process have the same streams, so that none of them shares a queue with one that waits."""
    found: dict[int, Any] = {}
    taken: Counter[str] = Counter()
    for number, priority in priorities.items():
        made = _made.setdefault((device, priority), [])
        if taken[priority] == len(made):
            made.append(torch.cuda.Stream(device, priority=HIGH if priority == "high" else 0))
        found[number] = made[taken[priority]]
        taken[priority] += 1
    return found


def _leaves(task: Task) -> int:
    """What its products leave free; only those of bodies know what is beside them."""
    if not isinstance(task, PRODUCTS):
        return ANY
    return task.leaves if isinstance(task, Run) else 0


def _events(tasks: tuple[Task, ...]) -> dict[int, Any]:
    """An event for each task that one of another stream waits for, and for each send."""
    needed = {i for t in tasks for i in t.waits if tasks[i].stream != t.stream}
    needed |= {i for i, t in enumerate(tasks) if sends(t)}
    return {i: torch.cuda.Event() for i in sorted(needed)}
