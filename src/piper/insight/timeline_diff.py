"""Timeline diff: two timelines in, of one plan or of two; where their steps differ in time, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import mean, median

import msgspec

from piper.errors import FileError
from piper.insight.critical_path import kind_of
from piper.insight.memory_peak import largest_total
from piper.insight.suspects import body_of
from piper.insight.use_of_time import use_of_time
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Label, Timeline

WAITING = "waiting for peers"


class Row(msgspec.Struct, frozen=True):
    """All spans of one name in a step, of all ranks: how many, their seconds together, and the median of
    one. Of communication they count from when its last member is there."""

    name: str
    count: tuple[float, float]
    total: tuple[float, float]
    usual: tuple[float, float]

    @property
    def difference(self) -> float:
        return self.total[1] - self.total[0]


class RankRow(msgspec.Struct, frozen=True):
    """What a rank does in a step, in seconds, and the most bytes that it holds; 0 if nobody knows."""

    rank: int
    computing: tuple[float, float]
    exposed: tuple[float, float]
    idle: tuple[float, float]
    peak: tuple[int, int]

    @property
    def difference(self) -> float:
        """What it computes, waits and idles more or less."""
        parts = (self.computing, self.exposed, self.idle)
        return sum(abs(b - a) for a, b in parts)


class TimelineDiff(msgspec.Struct, frozen=True):
    """The largest differences first. `by_task` matches spans by name where both are of one plan;
    `by_body` by phase or kind, and tags without the microbatch, where they are of two."""

    seconds: tuple[float, float]
    same_plan: bool
    by_kind: tuple[Row, ...]
    by_directive: tuple[Row, ...]
    by_task: tuple[Row, ...]
    by_body: tuple[Row, ...]
    by_rank: tuple[RankRow, ...]


def timeline_diff(a: Timeline, b: Timeline) -> TimelineDiff:
    """Of settled steps."""
    for timeline in (a, b):
        if not timeline.steps or timeline.unit != "s":
            raise FileError("a timeline without measured or simulated steps has nothing to compare")
    spans = list(_spans(a)), list(_spans(b))
    same = (a.directives, _names(a)) == (b.directives, _names(b))
    return TimelineDiff(
        (_step(a), _step(b)),
        same,
        _rows(spans, lambda side, label: kind_of(label), waiting=True),
        _rows(spans, lambda side, label: (a, b)[side].origin(label)),
        _rows(spans, lambda side, label: label.name) if same else (),
        () if same else _rows(spans, _body),
        tuple(_ranks(a, b)),
    )


def _names(timeline: Timeline) -> dict[int, list[str]]:
    """The tasks of every rank: a plan that was made again, from another line, has the same."""
    found = {}
    for track in timeline.tracks:
        names = [label.name for label in track.labels]
        found.update(dict.fromkeys(track.ranks, names))
    return found


def _step(timeline: Timeline) -> float:
    return median(timeline.step_seconds[step] for step in timeline.settled)


class _Took(msgspec.Struct, frozen=True):
    """One span: how often there is one like it in a step, its seconds, and those that it waits."""

    label: Label
    weight: float
    seconds: float
    waited: float


def _spans(timeline: Timeline) -> Iterator[_Took]:
    steps = timeline.settled
    for step in steps:
        meetings = Meetings(timeline, step)
        for number, track in enumerate(timeline.tracks):
            weight = len(track.ranks) / len(steps)
            for span in meetings.spans[number]:
                place = Place(number, span)
                label = track.labels[track.which[span]]
                came, end = meetings.came(place), track.end[span]
                if not label.communicates:
                    yield _Took(label, weight, end - track.start[span], 0.0)
                    continue
                began = min(max(meetings.began(place), came), end)
                yield _Took(label, weight, end - began, began - came)


def _rows(
    spans: tuple[list[_Took], list[_Took]],
    name: Callable[[int, Label], str],
    *,
    waiting: bool = False,
) -> tuple[Row, ...]:
    count: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    each: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for side, found in enumerate(spans):
        for took in found:
            parts = [(name(side, took.label), took.seconds)]
            if waiting and took.label.communicates:
                parts.append((WAITING, took.waited))
            for key, seconds in parts:
                count[key][side] += took.weight
                total[key][side] += took.weight * seconds
                each[key][side].append(seconds)
    rows = [
        Row(key, _pair(count[key]), _pair(total[key]), _pair(map(_median, each[key])))
        for key in total
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference)))


def _body(side: int, label: Label) -> str:
    return body_of(label).removesuffix("[]")


def _pair(values: Iterable[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _ranks(a: Timeline, b: Timeline) -> Iterator[RankRow]:
    """If both have the same ranks: the first of those that both have on one track."""
    if sorted(r for t in a.tracks for r in t.ranks) != sorted(r for t in b.tracks for r in t.ranks):
        return
    uses = _uses(a), _uses(b)
    seen: set[tuple[int, int]] = set()
    rows = []
    where = [{r: n for n, t in enumerate(x.tracks) for r in t.ranks} for x in (a, b)]
    for rank in sorted(where[0]):
        place = where[0][rank], where[1][rank]
        if place in seen:
            continue
        seen.add(place)
        one, other = uses[0][place[0]], uses[1][place[1]]
        peaks = largest_total(a.tracks[place[0]]), largest_total(b.tracks[place[1]])
        computing, exposed, idle = zip(one, other, strict=True)
        rows.append(RankRow(rank, computing, exposed, idle, peaks))
    yield from sorted(rows, key=lambda row: -row.difference)


def _uses(timeline: Timeline) -> list[tuple[float, float, float]]:
    """Per track the mean of its computing, exposed and idle seconds."""
    steps = [use_of_time(timeline, step) for step in timeline.settled]
    return [
        (
            mean(use.computing for use in found),
            mean(use.exposed for use in found),
            mean(use.idle for use in found),
        )
        for found in zip(*steps, strict=True)
    ]
