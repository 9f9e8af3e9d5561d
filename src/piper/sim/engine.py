"""Engine: rows of tasks with their seconds in; when each starts and ends, all side by side, out.

Time goes from event to event. Between two of them everything goes on at a constant rate: tasks that
compute on one row share what communication leaves them of the device; communications share the link
of each row that they go through, and the busiest of these rows sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from piper.errors import PlanError

ALONE = -1  # not a meeting
FLOWS = 1  # of an event: a meeting's bytes begin to flow; else a task begins
LEAST = 0.02  # of a device, that computation gets whatever communication takes


@dataclass
class Work:
    """What rows of one class have in common, task by task in the order of dispatch: the seconds of the
    host, the earlier tasks that are complete before it starts, and whether the host goes on only when it
    is complete."""

    names: Sequence[str]
    host: list[float]
    needs: Sequence[Sequence[int]]
    blocks: list[bool]

    def __post_init__(self) -> None:
        self.num_needs = [len(needs) for needs in self.needs]
        self.following: list[list[int]] = [[] for _ in self.needs]
        for index, needs in enumerate(self.needs):
            for before in needs:
                self.following[before].append(index)


@dataclass
class Row:
    """One party: per task its seconds on the device, or the number of its meeting."""

    name: str
    work: Work
    seconds: list[float]
    meeting: list[int]


@dataclass
class Meeting:
    """A communication: its members as (row, task), how long until the first byte is there, the seconds
    that it takes of a link alone, and its share of each device."""

    latency: float
    seconds: float
    share: float
    holds: bool  # whether it takes its share while it waits, too
    members: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Times:
    """Per row and task."""

    issued: list[list[float]]
    start: list[list[float]]
    end: list[list[float]]


class Engine:
    """One step; `run` may be called again, for the next one.

    With `host_computes` a row's host is at one task at a time, and goes on beside communication only.
    """

    def __init__(self, rows: list[Row], meetings: list[Meeting], *, host_computes: bool) -> None:
        self.rows = rows
        self.meetings = meetings
        self.host_computes = host_computes
        self.base = [0]
        self.row_of: list[int] = []
        self.seconds: list[float] = []
        self.host: list[float] = []
        self.meeting: list[int] = []
        self.blocks: list[bool] = []
        self.needed: list[int] = []
        for number, row in enumerate(rows):
            self.row_of += [number] * len(row.seconds)
            self.seconds += row.seconds
            self.host += row.work.host
            self.meeting += row.meeting
            self.blocks += row.work.blocks
            self.needed += row.work.num_needs
            self.base.append(len(self.seconds))
        self.total = self.base[-1]
        self.seconds += [meeting.seconds for meeting in meetings]
        self.following = [row.work.following for row in rows]
        self.through = [sorted({row for row, _ in meeting.members}) for meeting in meetings]

    def run(self, begins: Sequence[float]) -> Times:
        """All tasks, where each row's host begins at its own time."""
        total, rows = self.total, len(self.rows)
        self.missing = self.needed[:]
        self.issued, self.start, self.end = [0.0] * total, [0.0] * total, [-1.0] * total
        jobs = total + len(self.meetings)
        self.left, self.rate = [0.0] * jobs, [0.0] * jobs
        self.since, self.version = [0.0] * jobs, [0] * jobs
        self.arrived = [0] * len(self.meetings)
        self.active: list[list[int]] = [[] for _ in range(rows)]  # tasks that compute
        self.talks: list[list[int]] = [[] for _ in range(rows)]  # meetings under way
        self.taken = [0.0] * rows  # share of the device
        self.heap: list[tuple[float, int, int]] = []
        self.at = self.base[:rows]  # where each host is, if it computes
        self.waiting = [False] * rows
        for row, begin in enumerate(begins):
            if self.host_computes:
                self._host_at(row, self.base[row], begin)
            else:
                self._dispatch(row, self.base[row], begin)
        self._events()
        if min(self.end, default=0.0) < 0:
            raise PlanError(f"{self._stuck()} never ends")
        return Times(*map(self._by_row, (self.issued, self.start, self.end)))

    def _by_row(self, values: list[float]) -> list[list[float]]:
        return [values[a:b] for a, b in zip(self.base, self.base[1:], strict=False)]

    def _stuck(self) -> str:
        task = next(i for i, end in enumerate(self.end) if end < 0)
        row = self.row_of[task]
        return f"{self.rows[row].work.names[task - self.base[row]]} on {self.rows[row].name}"

    def _events(self) -> None:
        heap, version, total = self.heap, self.version, self.total
        while heap:
            now, job, number = heappop(heap)
            if job < 0:
                if number:
                    self._flows(-job - 1, now)
                elif self.host_computes:
                    self._posted(-job - 1, now)
                else:
                    self._begin(-job - 1, now)
            elif version[job] == number:
                if job < total:
                    self._computed(job, now)
                else:
                    self._met(job - total, now)

    # A host that hands tasks to a device

    def _dispatch(self, row: int, task: int, now: float) -> None:
        """All tasks up to the next that the host waits for. Those that it reaches later are dispatched
        already, but do not start before."""
        last, host, missing, issued = self.base[row + 1], self.host, self.missing, self.issued
        while task < last:
            now += host[task]
            issued[task] = now
            if missing[task] == 0:
                heappush(self.heap, (now, -task - 1, 0))
            if self.blocks[task]:
                for later in range(task + 1, last):
                    issued[later] = -1.0
                return
            task += 1

    def _release(self, task: int, now: float) -> None:
        """What a task's end lets start."""
        missing, issued = self.missing, self.issued
        row = self.row_of[task]
        base = self.base[row]
        for later in self.following[row][task - base]:
            later += base
            missing[later] -= 1
            if missing[later] == 0:
                at = issued[later]
                if at > now:
                    heappush(self.heap, (at, -later - 1, 0))
                elif at >= 0:
                    self._begin(later, now)
        if self.blocks[task]:
            self._dispatch(row, task + 1, now)

    # A host that computes itself

    def _host_at(self, row: int, task: int, now: float) -> None:
        last = self.base[row + 1]
        self.at[row] = task
        self.waiting[row] = False
        if task == last:
            return
        if self.missing[task]:
            self.waiting[row] = True
        elif self.meeting[task] == ALONE:
            self.issued[task] = now
            self._begin(task, now)
        else:
            heappush(self.heap, (now + self.host[task], -task - 1, 0))

    def _posted(self, task: int, now: float) -> None:
        """The host has started a communication."""
        self._begin(task, now)
        self.start[task] = now - self.host[task]
        self.issued[task] = now
        self._host_at(self.row_of[task], task + 1, now)

    def _free(self, task: int, now: float) -> None:
        """What a communication's end lets the host go on with."""
        row = self.row_of[task]
        base = self.base[row]
        for later in self.following[row][task - base]:
            later += base
            self.missing[later] -= 1
            if self.missing[later] == 0 and self.waiting[row] and self.at[row] == later:
                self._host_at(row, later, now)

    # Both

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        number = self.meeting[task]
        row = self.row_of[task]
        if number == ALONE:
            active = self.active[row]
            active.append(task)
            self._job(task, now)
            if len(active) == 1 and not self.taken[row]:
                self._set(task, 1.0, now)
            else:
                self._rerate(row, now)
            return
        meeting = self.meetings[number]
        self.arrived[number] += 1
        if meeting.holds and meeting.share:
            self.taken[row] += meeting.share
            self._rerate(row, now)
        if self.arrived[number] == len(meeting.members):
            if meeting.latency:
                heappush(self.heap, (now + meeting.latency, -number - 1, FLOWS))
            else:
                self._flows(number, now)

    def _flows(self, number: int, now: float) -> None:
        """The bytes of a meeting begin to flow."""
        meeting, through = self.meetings[number], self.through[number]
        if not meeting.seconds:
            self._met(number, now)
            return
        self._job(self.total + number, now)
        for row in through:
            self.talks[row].append(number)
            if not meeting.holds:
                self.taken[row] += meeting.share
        for row in through:
            self._rerate(row, now)

    def _job(self, job: int, now: float) -> None:
        self.left[job] = self.seconds[job]
        self.rate[job] = 0.0
        self.since[job] = now

    def _computed(self, task: int, now: float) -> None:
        row = self.row_of[task]
        active = self.active[row]
        active.remove(task)
        self.version[task] += 1
        self.end[task] = now
        if active:
            self._rerate(row, now)
        if self.host_computes:
            self._host_at(row, task + 1, now)
        else:
            self._release(task, now)

    def _met(self, number: int, now: float) -> None:
        meeting = self.meetings[number]
        self.version[self.total + number] += 1
        for row in self.through[number]:
            if meeting.seconds:
                self.talks[row].remove(number)
            if meeting.share and (meeting.holds or meeting.seconds):
                self.taken[row] -= meeting.share
            self._rerate(row, now)
        base, end = self.base, self.end
        for row, index in meeting.members:
            end[base[row] + index] = now
        for row, index in meeting.members:
            if self.host_computes:
                self._free(base[row] + index, now)
            else:
                self._release(base[row] + index, now)

    def _rerate(self, row: int, now: float) -> None:
        """Give all that goes on at a row its present rate."""
        active, talks = self.active[row], self.talks[row]
        if active:
            free = 1.0 - self.taken[row] if self.taken[row] else 1.0
            rate = max(free, LEAST) / len(active)
            for task in active:
                if self.rate[task] != rate:
                    self._set(task, rate, now)
        for number in talks:
            busiest = max(len(self.talks[through]) for through in self.through[number])
            if self.rate[self.total + number] != 1.0 / busiest:
                self._set(self.total + number, 1.0 / busiest, now)

    def _set(self, job: int, rate: float, now: float) -> None:
        left = self.left[job] - self.rate[job] * (now - self.since[job])
        left = left if left > 0.0 else 0.0
        self.left[job] = left
        self.rate[job] = rate
        self.since[job] = now
        self.version[job] += 1
        heappush(self.heap, (now + left / rate, job, self.version[job]))
