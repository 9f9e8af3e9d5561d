"""Engine: rows of tasks with their seconds in; when each starts and ends, all side by side, out.

Time goes from event to event. Between two of them everything goes on at a constant rate: tasks that
compute on one row share what communication leaves them of the device; communications share the link
of each row that they go through, each way, and the busiest of these sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from piper.errors import PlanError

ALONE = -1  # not a meeting
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
        self.after: list[list[int]] = [[] for _ in self.needs]  # who needs it, so many tasks later
        for index, needs in enumerate(self.needs):
            for before in needs:
                self.after[before].append(index - before)


@dataclass
class Row:
    """One party: per task its seconds on the device, or the number of its meeting."""

    name: str
    work: Work
    seconds: list[float]
    meeting: list[int]


@dataclass(slots=True)
class Meeting:
    """A communication: its members as (row, task), how long until the first byte is there, the seconds
    that it takes of a link alone, and its share of each device."""

    latency: float
    seconds: float
    share: float
    holds: bool  # whether it takes its share while it waits, too
    members: list[tuple[int, int]] = field(default_factory=list)
    sender: int | None = None  # of a message, the row that sends; links go both ways at once


@dataclass
class Times:
    """Per row and task."""

    issued: list[list[float]]
    start: list[list[float]]
    end: list[list[float]]


_Going = tuple[float, float, float, float]  # until when, seconds left, at which rate, since when


class Engine:
    """One step; `run` may be called again, for the next one.

    With `host_computes` a row's host is at one task at a time, and goes on beside communication only.
    A link has `lanes`: so many communications at once are as fast as one.
    Tasks of all rows are numbered one after the other, and meetings behind them: each is a job. An event
    is a time and a job that ends then, unless its rate has changed; below 0, one that begins.
    """

    def __init__(
        self, rows: list[Row], meetings: list[Meeting], *, host_computes: bool, lanes: float = 1.0
    ) -> None:
        self.rows = rows
        self.meetings = meetings
        self.host_computes = host_computes
        self.lanes = lanes
        self.base = [0]
        self.row_of: list[int] = []
        self.seconds: list[float] = []
        self.host: list[float] = []
        self.meeting: list[int] = []
        self.blocks: list[bool] = []
        self.needed: list[int] = []
        self.after: list[list[int]] = []
        for number, row in enumerate(rows):
            self.row_of += [number] * len(row.seconds)
            self.seconds += row.seconds
            self.host += row.work.host
            self.meeting += row.meeting
            self.blocks += row.work.blocks
            self.needed += row.work.num_needs
            self.after += row.work.after
            self.base.append(len(self.seconds))
        self.total = self.base[-1]
        self.seconds += [meeting.seconds for meeting in meetings]
        base = self.base
        self.members = [[base[row] + task for row, task in m.members] for m in meetings]
        self.through = [sorted({row for row, _ in m.members}) for m in meetings]
        self.ways = [_ways(m, rows) for m, rows in zip(meetings, self.through, strict=True)]

    def run(self, begins: Sequence[float]) -> Times:
        """All tasks, where each row's host begins at its own time."""
        total, rows = self.total, len(self.rows)
        self.missing = self.needed[:]
        self.start, self.end = [0.0] * total, [-1.0] * total
        self.issued = [-1.0] * total  # not yet
        self.going: dict[int, _Going] = {}
        self.arrived = [0] * len(self.meetings)
        self.active: list[list[int]] = [[] for _ in range(rows)]  # tasks that compute
        self.talks: list[list[int]] = [[] for _ in range(rows)]  # meetings under way
        self.busy = [0] * (2 * rows)  # ways of links: how many meetings each is used by
        self.taken = [0.0] * rows  # share of the device
        self.heap: list[tuple[float, int]] = []
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
        return [values[a:b] for a, b in pairwise(self.base)]

    def _stuck(self) -> str:
        task = next(i for i, end in enumerate(self.end) if end < 0)
        row = self.row_of[task]
        return f"{self.rows[row].work.names[task - self.base[row]]} on {self.rows[row].name}"

    def _events(self) -> None:
        heap, going, total = self.heap, self.going, self.total
        begin = self._posted if self.host_computes else self._begin
        computed, met, flows = self._computed, self._met, self._flows
        while heap:
            now, job = heappop(heap)
            if job < 0:
                job = ~job
                if job < total:
                    begin(job, now)
                else:
                    flows(job - total, now)
            elif job in going and going[job][0] == now:
                del going[job]
                if job < total:
                    computed(job, now)
                else:
                    met(job - total, now)

    # A host that hands tasks to a device

    def _dispatch(self, row: int, task: int, now: float) -> None:
        """All tasks up to the next that the host waits for. Those that it reaches later are dispatched
        already, but do not start before."""
        host, missing, issued, blocks = self.host, self.missing, self.issued, self.blocks
        for dispatched in range(task, self.base[row + 1]):
            now += host[dispatched]
            issued[dispatched] = now
            if not missing[dispatched]:
                heappush(self.heap, (now, ~dispatched))
            if blocks[dispatched]:
                return

    def _release(self, task: int, now: float) -> None:
        """What a task's end lets start."""
        missing, issued = self.missing, self.issued
        for distance in self.after[task]:
            later = task + distance
            missing[later] -= 1
            if not missing[later]:
                at = issued[later]
                if at > now:
                    heappush(self.heap, (at, ~later))
                elif at >= 0:
                    self._begin(later, now)
        if self.blocks[task]:
            self._dispatch(self.row_of[task], task + 1, now)

    # A host that computes itself

    def _host_at(self, row: int, task: int, now: float) -> None:
        self.at[row] = task
        self.waiting[row] = False
        if task == self.base[row + 1]:
            return
        if self.missing[task]:
            self.waiting[row] = True
        elif self.meeting[task] == ALONE:
            self.issued[task] = now
            self._begin(task, now)
        else:
            heappush(self.heap, (now + self.host[task], ~task))

    def _posted(self, task: int, now: float) -> None:
        """The host has started a communication."""
        self._begin(task, now)
        self.start[task] = now - self.host[task]
        self.issued[task] = now
        self._host_at(self.row_of[task], task + 1, now)

    def _free(self, task: int, now: float) -> None:
        """What a communication's end lets the host go on with."""
        row, missing = self.row_of[task], self.missing
        for distance in self.after[task]:
            later = task + distance
            missing[later] -= 1
            if not missing[later] and self.waiting[row] and self.at[row] == later:
                self._host_at(row, later, now)

    # Both

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        number = self.meeting[task]
        row = self.row_of[task]
        if number == ALONE:
            active = self.active[row]
            active.append(task)
            if len(active) > 1 or self.taken[row]:
                self._share_device(row, now)
            else:
                self._set(task, 1.0, now)
            return
        meeting = self.meetings[number]
        self.arrived[number] += 1
        if meeting.holds and meeting.share:
            self._take(row, meeting.share, now)
        if self.arrived[number] == len(meeting.members):
            if (
                meeting.latency or not meeting.seconds
            ):  # an event, lest a row of free ones goes deep
                heappush(self.heap, (now + meeting.latency, ~(self.total + number)))
            else:
                self._flows(number, now)

    def _computed(self, task: int, now: float) -> None:
        row = self.row_of[task]
        active = self.active[row]
        active.remove(task)
        self.end[task] = now
        if active:
            self._share_device(row, now)
        if self.host_computes:
            self._host_at(row, task + 1, now)
        else:
            self._release(task, now)

    def _take(self, row: int, share: float, now: float) -> None:
        """From computation on a row, for communication; or give it back."""
        self.taken[row] += share
        if self.active[row]:
            self._share_device(row, now)

    def _share_device(self, row: int, now: float) -> None:
        """Give the tasks that compute on a row their present rate."""
        active, taken = self.active[row], self.taken[row]
        free = 1.0 - taken if taken else 1.0
        rate = (free if free > LEAST else LEAST) / len(active)
        for task in active:
            self._set(task, rate, now)

    def _flows(self, number: int, now: float) -> None:
        """The bytes of a meeting begin to flow."""
        meeting = self.meetings[number]
        if not meeting.seconds:
            self._met(number, now)
            return
        takes = meeting.share if not (meeting.holds or self.host_computes) else 0.0
        beside: list[int] = []
        for way in self.ways[number]:
            self.busy[way] += 1
        for row in self.through[number]:
            talks = self.talks[row]
            beside += talks
            talks.append(number)
            if takes:
                self._take(row, takes, now)
        self._share_links(number, now)
        self._shared_anew(number, beside, now)

    def _met(self, number: int, now: float) -> None:
        meeting = self.meetings[number]
        gives = meeting.share if meeting.holds or meeting.seconds else 0.0
        beside: list[int] = []
        if meeting.seconds:
            for way in self.ways[number]:
                self.busy[way] -= 1
        for row in self.through[number]:
            if meeting.seconds:
                talks = self.talks[row]
                talks.remove(number)
                beside += talks
            if gives and not self.host_computes:
                self._take(row, -gives, now)
        self._shared_anew(number, beside, now)
        end = self.end
        ended = self._free if self.host_computes else self._release
        for task in self.members[number]:
            end[task] = now
            ended(task, now)

    def _shared_anew(self, number: int, beside: list[int], now: float) -> None:
        """A meeting has come or gone beside others. A host that computes moves their bytes itself: what
        they take of it goes with their rates."""
        others = set(beside)
        for other in others:
            self._share_links(other, now)
        if self.host_computes:
            rows = set(self.through[number]).union(*(self.through[other] for other in others))
            for row in rows:
                self._moves(row, now)

    def _moves(self, row: int, now: float) -> None:
        """What a host's communication takes of it at present."""
        going, total, meetings = self.going, self.total, self.meetings
        taken = 0.0
        for number in self.talks[row]:
            if meetings[number].share:
                taken += meetings[number].share * going[total + number][2]
        if taken != self.taken[row]:
            self.taken[row] = taken
            if self.active[row]:
                self._share_device(row, now)

    def _share_links(self, number: int, now: float) -> None:
        """Give a meeting under way its present rate: that of the busiest link that it goes through."""
        busy = self.busy
        most = max([busy[way] for way in self.ways[number]])
        self._set(self.total + number, self.lanes / most if most > self.lanes else 1.0, now)

    def _set(self, job: int, rate: float, now: float) -> None:
        """From now on a job goes on at a rate."""
        known = self.going.get(job)
        if known is None:
            left = self.seconds[job]
        else:
            _, left, before, since = known
            if before == rate:
                return
            left -= before * (now - since)
            left = left if left > 0.0 else 0.0
        end = now + left / rate
        self.going[job] = end, left, rate, now
        heappush(self.heap, (end, job))


def _ways(meeting: Meeting, rows: list[int]) -> list[int]:
    """Of the links of these rows, 2 x row out and the next one in."""
    if meeting.sender is None:
        return [way for row in rows for way in (2 * row, 2 * row + 1)]
    return [2 * row if row == meeting.sender else 2 * row + 1 for row in rows]
