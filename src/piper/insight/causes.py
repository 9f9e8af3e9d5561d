"""Causes: a plan and a timeline of it in; for every span, what it had to wait for last, out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from piper.errors import PlanError
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Timeline
from piper.plan.held_by import held_by
from piper.plan.tasks import Comm
from piper.plan.types import Plan
from piper.sim.timeline_classes import classes_of

Why = Literal["data", "stream", "host", "peer", "begin", "end"]


class Cause(NamedTuple):
    """What a span waited for last: `place` was over `at` that time, and why that mattered.

    data: it waits for that task; stream: that one came before it there; host: the host was busy with
    that one; peer: the last member of a communication came only then; begin: the step began then; end:
    nothing is left to do, and the step ends with that one.
    """

    place: Place | None
    at: float
    why: Why


@dataclass(frozen=True)
class _Order:
    """What a class's tasks wait for."""

    needs: list[tuple[int, ...]]
    before: list[int]  # on its stream, or -1


class Causes(Meetings):
    """Of one step of a timeline."""

    def __init__(self, plan: Plan, timeline: Timeline, step: int = -1) -> None:
        if not timeline.steps:
            raise PlanError("a timeline without steps says nothing of causes")
        self.plan = plan
        self.step = step % len(timeline.steps)
        super().__init__(timeline, self.step)
        self.begin, self.end = timeline.steps[self.step]
        self.classes = classes_of(plan, timeline)
        if not any(self.spans):
            raise PlanError("a plan without tasks has no causes")
        self._orders: dict[int, _Order] = {}

    def _order(self, number: int) -> _Order:
        found = self.classes[number]
        if id(found) not in self._orders:
            last: dict[int, int] = defaultdict(lambda: -1)
            before = []
            for index, task in enumerate(found.tasks):
                before.append(last[task.stream])
                last[task.stream] = index
            needs = [task.waits for task in found.tasks]
            if self.host_computes:
                needs = held_by(found.tasks, found.slots)
            self._orders[id(found)] = _Order(needs, before)
        return self._orders[id(found)]

    def track_number(self, rank: int) -> int:
        if rank not in self._numbers:
            self.timeline.track_of(rank)  # raises
        return self._numbers[rank]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        tracks = enumerate(self.timeline.tracks)
        return {rank: number for number, track in tracks for rank in track.ranks}

    def task(self, place: Place) -> int:
        """The number of a span's task in its class."""
        return self.timeline.tracks[place.track].which[place.span]

    @cached_property
    def last(self) -> Place:
        """The span that ends last."""
        tracks = self.timeline.tracks
        places = (Place(n, i) for n, spans in enumerate(self.spans) for i in spans)
        return max(places, key=lambda p: tracks[p.track].end[p.span])

    def read_before(self, place: Place) -> Place | None:
        """The last task, up to one, that its host waited for."""
        first = self.spans[place.track].start
        tasks = self.classes[place.track].tasks
        reads = (i for i in range(place.span, first - 1, -1) if tasks[i - first].blocks)
        found = next(reads, None)
        return None if found is None else Place(place.track, found)

    def cause(self, place: Place) -> Cause:
        """Of a span's start, on its own rank."""
        track = self.timeline.tracks[place.track]
        spans = self.spans[place.track]
        first = spans.start
        index = place.span - first
        order = self._order(place.track)
        start = track.start[place.span]
        found: list[Cause] = [Cause(None, self.begin, "begin")]
        for need in order.needs[index]:
            found.append(self._ended(place.track, first + need, "data"))
        if self.host_computes:
            found += self._host(place, first)
        else:
            before = order.before[index]
            if before >= 0:
                found.append(self._ended(place.track, first + before, "stream"))
            issued = track.issued[place.span]
            if index > 0:
                found.append(Cause(Place(place.track, place.span - 1), issued, "host"))
        late = start + max(self.timeline.clock_error, 1e-9)
        return max(
            (cause for cause in found if cause.at <= late),
            key=lambda cause: (cause.at, _PREFERRED[cause.why]),
        )

    def _ended(self, track: int, span: int, why: Why) -> Cause:
        return Cause(Place(track, span), self.timeline.tracks[track].end[span], why)

    def _host(self, place: Place, first: int) -> list[Cause]:
        """A host that computes is through with a communication when it has started it."""
        if place.span == first:
            return []
        before = Place(place.track, place.span - 1)
        track = self.timeline.tracks[place.track]
        talks = isinstance(self.classes[place.track].tasks[before.span - first], Comm)
        return [
            Cause(before, track.issued[before.span] if talks else track.end[before.span], "host")
        ]


_PREFERRED: dict[Why, int] = {"data": 4, "stream": 3, "host": 2, "peer": 1, "begin": 0, "end": 0}
