"""DeviceRecorder: the times of tasks on a GPU, noted by the device without holding up the host.

Two events lie around each task on its stream; they are read when the recorded steps are over. The clock
of the device is tied to that of the host before and after, by events that the host sees pass.
"""

from __future__ import annotations

from math import ceil
from time import perf_counter_ns
from typing import Any

import torch

from piper.plan.tasks import Task
from piper.runtime.order.device_order import DeviceOrder
from piper.runtime.record.clocks import Tie
from piper.runtime.record.recorder import Notes, RankTimes, in_steps
from piper.runtime.transport.transport import Pending
from piper.runtime.worker.handlers import Start
from piper.runtime.worker.worker import Worker
from piper.runtime.worker.wrapped import Wrapped

TRIES = 20
MOST_SPARE = 100_000  # events that are made beforehand
ROUNDING = 2.0**-24  # of an elapsed time, at most
_MILLISECOND = 1e6


class DeviceRecorder:
    """Events of `steps` steps are made before the first; those of more, when they are needed."""

    def __init__(self, worker: Worker, steps: int | None) -> None:
        assert isinstance(worker.order, DeviceOrder)
        tasks = worker.me.tasks
        self.stream, streams = worker.order.stream, worker.order.streams
        self.notes = [Notes() for _ in tasks]
        self.events: list[list[tuple[Any, Any]]] = [[] for _ in tasks]
        self.spare = [_event() for _ in range(min(2 * len(tasks) * (steps or 1), MOST_SPARE))]
        for event in self.spare:  # torch makes it on the device when it is first recorded
            event.record(self.stream)
        self.base, self.first = self._passing()
        self.wrapped = Wrapped(
            worker,
            [
                self._dispatching(task, start, streams[task.stream], index)
                for index, (task, start) in enumerate(zip(tasks, worker.starts, strict=True))
            ],
        )

    def _dispatching(self, task: Task, start: Start, stream: Any, index: int) -> Start:
        note, noted = self.notes[index], self.events[index].append
        issued, waited, blocks = note.issued.append, note.waited.append, task.blocks
        spare, now = self.spare, perf_counter_ns

        def run() -> Pending | None:
            first, last = (spare.pop(), spare.pop()) if spare else (_event(), _event())
            first.record(stream)
            before = now()
            pending = start()
            after = now()
            last.record(stream)
            issued(after)
            waited(after - before if blocks else 0)
            noted((first, last))
            return pending

        return run

    def _passing(self) -> tuple[Any, Tie]:
        """An event on the idle device, and when it passed by the host's clock."""
        torch.cuda.synchronize(self.stream.device)
        found = []
        for _ in range(TRIES):
            event = _event()
            before = perf_counter_ns()
            event.record(self.stream)
            event.synchronize()
            after = perf_counter_ns()
            found.append(
                (after - before, event, Tie((before + after) // 2, (after - before + 1) // 2))
            )
        _, event, tie = min(found, key=lambda one: one[0])
        return event, tie

    def end(self) -> None:
        self.wrapped.end()

    def times(self, tie: Tie) -> RankTimes:
        last, seen = self._passing()
        begins = self._begins()
        event, at = begins[-1]
        total = at + _elapsed(event, last)
        later = Tie(seen.offset - total, seen.error)
        device = self.first.until(later)  # against nanoseconds since `base`
        for note, pairs in zip(self.notes, self.events, strict=True):
            for (begin, at), (first, last) in zip(begins[1:], pairs, strict=False):
                note.start.append(device.offset + at + _elapsed(begin, first))
                note.end.append(device.offset + at + _elapsed(begin, last))
        rounding = ceil(total * ROUNDING) + len(begins) + 1
        return in_steps(self.notes, Tie(tie.offset, tie.error + device.error + rounding))

    def _begins(self) -> list[tuple[Any, int]]:
        """`base` and the first event of each step, with nanoseconds since `base`: from one to the next,
        since what has elapsed since long ago is a number of 24 bits, too."""
        found = [(self.base, 0)]
        for first, _ in self.events[0] if self.events else ():
            event, at = found[-1]
            found.append((first, at + _elapsed(event, first)))
        return found


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _elapsed(first: Any, last: Any) -> int:
    """Nanoseconds on the device from one event to another."""
    return round(first.elapsed_time(last) * _MILLISECOND)
