"""HostRecorder: the times of tasks that the host runs itself, and of communication beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns

from torch import Tensor

from piper.plan.tasks import Comm
from piper.runtime.record.clocks import Tie
from piper.runtime.record.recorder import Notes, RankTimes, in_steps
from piper.runtime.transport.arrivals import seeing_arrivals
from piper.runtime.transport.transport import Pending
from piper.runtime.worker.handlers import Start, prepare
from piper.runtime.worker.worker import Worker
from piper.runtime.worker.wrapped import Wrapped


class HostRecorder:
    """A communication is over when it is first seen to be. After every task the oldest one under way of
    each stream is looked at, so that one which is awaited late does not seem to have lasted."""

    def __init__(self, worker: Worker) -> None:
        tasks = worker.me.tasks
        self.notes = [Notes() for _ in tasks]
        # Communication that is not seen to be over, per stream that has any.
        self.under_way: dict[int, deque[_UnderWay]] = {}
        self.wrapped = Wrapped(
            worker,
            [
                self._talking(start, note, task.stream)
                if isinstance(task, Comm)
                else self._computing(start, note)
                for task, start, note in zip(tasks, _startable(worker), self.notes, strict=True)
            ],
        )

    def _computing(self, start: Start, note: Notes) -> Start:
        started, ended, under_way = note.start.append, note.end.append, self.under_way
        look, now = self.look, perf_counter_ns

        def run() -> None:
            started(now())
            start()
            ended(now())
            if under_way:
                look()

        return run

    def _talking(self, start: Start, note: Notes, stream: int) -> Start:
        issued, started, ended = note.issued.append, note.start.append, note.end.append
        look, now, under_way = self.look, perf_counter_ns, self.under_way

        def run() -> Pending:
            started(now())
            pending = start()
            issued(now())
            assert pending is not None
            if under_way:
                look()
            queue = under_way.get(stream)
            found = _UnderWay(pending, note, self)
            if queue is not None:
                queue.append(found)
            elif pending.ready():
                ended(now())
            else:
                under_way[stream] = deque((found,))
            return found

        return run

    def look(self) -> None:
        """Note what is over by now. A stream is in order, so that its first one is asked."""
        for stream, queue in list(self.under_way.items()):
            while queue[0].pending.ready():
                queue.popleft().note.end.append(perf_counter_ns())
                if not queue:
                    del self.under_way[stream]
                    break

    def end(self) -> None:
        self.wrapped.end()

    def times(self, tie: Tie) -> RankTimes:
        for note in self.notes:
            note.issued = note.issued or note.start  # of what the host computes
            note.waited = note.waited or [0] * len(note.start)
        return in_steps(self.notes, tie)


class _UnderWay:
    """A communication whose end is noted."""

    __slots__ = ("note", "pending", "ready", "recorder")

    def __init__(self, pending: Pending, note: Notes, recorder: HostRecorder) -> None:
        self.pending = pending
        self.ready = pending.ready
        self.note = note
        self.recorder = recorder

    def finish(self) -> list[Tensor]:
        note = self.note
        begun = perf_counter_ns()
        results = self.pending.finish()
        over = perf_counter_ns()
        note.waited.append(over - begun)
        if len(note.end) < len(note.waited):
            self._end(over)
        if self.recorder.under_way:
            self.recorder.look()
        return results

    def _end(self, time: int) -> None:
        """It was not seen to be over before; all earlier ones of its stream were."""
        under_way = self.recorder.under_way
        stream = next(stream for stream, queue in under_way.items() if queue[0] is self)
        under_way[stream].popleft()
        if not under_way[stream]:
            del under_way[stream]
        self.note.end.append(time)


def _startable(worker: Worker) -> Sequence[Start]:
    """What the tasks do, with receives that can be seen to be complete."""
    own, seeing = worker.transport, seeing_arrivals(worker.transport)
    if seeing is own:
        return worker.starts
    worker.transport = seeing
    try:
        return [
            prepare(worker, task) if isinstance(task, Comm) and task.facts.receives else start
            for task, start in zip(worker.me.tasks, worker.starts, strict=True)
        ]
    finally:
        worker.transport = own
