"""Span columns: one step of a timeline, with its causes where its plan is known, in; columns of all its
spans, out.

Times are ticks from the step's begin, so many that 31 bits hold the step and none is shorter than a
nanosecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from piper.insight.causes import Causes, Why
from piper.insight.critical_path import CriticalPath
from piper.observe.flows import Place
from piper.observe.timeline import Timeline, Track
from piper.view.columns import Columns, Ref
from piper.view.label_columns import NONE, LabelTables

WHYS: tuple[Why, ...] = ("data", "stream", "host", "peer", "begin", "end")
_MOST_TICKS = 1 << 31
_SHORTEST = 1e-9
_LATEST = (1 << 31) - 1  # what a host that is far ahead or behind is cut to


class Clock:
    """Ticks of a step."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.tick = max(_SHORTEST, (end - begin) / (_MOST_TICKS - 1))

    def __call__(self, time: float) -> int:
        """Never before the step's begin, or after its end."""
        return round((min(max(time, self.begin), self.end) - self.begin) / self.tick)

    def length(self, seconds: float) -> int:
        return min(max(round(seconds / self.tick), -_LATEST), _LATEST)


class SpanColumns(msgspec.Struct, frozen=True):
    """A row per span, in the order of dispatch: its label (none if span i is of label i), how much later
    than the one before it starts, how long it takes, how much later than that its host was through with
    starting it and how long the host was held, the number of its communication, and what it waited for
    last: so many spans before it, 0 for none, and why."""

    num: int
    which: Ref | None
    start: Ref
    length: Ref
    issued: Ref
    waited: Ref | None
    meeting: Ref
    cause: Ref | None = None
    why: Ref | None = None


class PathColumns(msgspec.Struct, frozen=True):
    """The critical path, a row per part, from the step's begin on."""

    track: Ref
    span: Ref
    begin: Ref
    end: Ref
    why: Ref
    runs: Ref
    by_kind: dict[str, float]
    by_directive: dict[str, float]


class StepSpans:
    """Of one step of a timeline."""

    def __init__(
        self, columns: Columns, labels: LabelTables, timeline: Timeline, step: int
    ) -> None:
        self.columns, self.labels = columns, labels
        self.timeline, self.step = timeline, step
        begin, end = timeline.steps[step] if timeline.steps else _bounds(timeline)
        self.clock = Clock(begin, end)
        self._meetings: dict[tuple[str, int], int] = {}

    def spans(self, track: Track) -> range:
        return track.step(self.step) if track.begins else range(len(track))

    def of_track(self, number: int, causes: Causes | None) -> SpanColumns:
        track, clock, columns = self.timeline.tracks[number], self.clock, self.columns
        spans = self.spans(track)
        which = [track.which[i] for i in spans]
        starts = [clock(track.start[i]) for i in spans]
        found = self._causes(causes, number, spans) if causes else []
        return SpanColumns(
            num=len(spans),
            which=None if which == list(range(len(spans))) else columns.counts(which),
            start=columns.column("i", (b - a for a, b in pairwise([0, *starts]))),
            length=columns.counts(
                [clock(track.end[i]) - start for i, start in zip(spans, starts, strict=True)]
            ),
            issued=columns.column(
                "i", (clock.length(track.issued[i] - track.start[i]) for i in spans)
            ),
            waited=columns.counts([clock.length(track.waited[i]) for i in spans])
            if track.waited
            else None,
            meeting=columns.column("i", self._who(track, spans)),
            cause=columns.counts([cause for cause, _ in found]) if causes else None,
            why=columns.counts([why for _, why in found]) if causes else None,
        )

    def _causes(self, causes: Causes, number: int, spans: range) -> list[tuple[int, int]]:
        found = []
        for span in spans:
            cause = causes.cause(Place(number, span))
            back = span - cause.place.span if cause.place else 0
            found.append((back, WHYS.index(cause.why)))
        return found

    def _who(self, track: Track, spans: range) -> Iterator[int]:
        """Spans with one number are one communication: the n-th of its name on each track."""
        seen: dict[str, int] = defaultdict(int)
        for span in spans:
            name = track.labels[track.which[span]].meeting
            if not name:
                yield NONE
                continue
            key = name, seen[name]
            seen[name] += 1
            yield self._meetings.setdefault(key, len(self._meetings))

    def path(self, found: CriticalPath) -> PathColumns:
        columns, segments, clock = self.columns, found.segments, self.clock
        firsts = [self.spans(track).start for track in self.timeline.tracks]
        return PathColumns(
            track=columns.counts([part.track for part in segments]),
            span=columns.counts([part.span - firsts[part.track] for part in segments]),
            begin=columns.counts([clock(part.begin) for part in segments]),
            end=columns.counts([clock(part.end) for part in segments]),
            why=columns.counts([WHYS.index(part.why) for part in segments]),
            runs=columns.counts([int(part.runs) for part in segments]),
            by_kind=found.by_kind,
            by_directive=found.by_directive,
        )


def _bounds(timeline: Timeline) -> tuple[float, float]:
    """Of a timeline without steps."""
    first: Iterable[float] = (track.first for track in timeline.tracks if len(track))
    return min(first, default=0.0), max((track.last for track in timeline.tracks), default=0.0)
