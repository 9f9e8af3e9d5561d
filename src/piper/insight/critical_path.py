"""Critical path: the causes of a step in; the chain of spans that made it as long as it is, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator

import msgspec

from piper.insight.causes import Causes, Why
from piper.observe.flows import Place
from piper.observe.timeline import Label

WAITING = "dispatch"  # what no task takes: the host, or a gap that nothing explains


class Segment(msgspec.Struct, frozen=True):
    """A stretch of the path: a span while it ran, or the time before it in which nobody did what it
    waited for. `why` says how it follows from the one before."""

    track: int
    span: int
    begin: float
    end: float
    why: Why
    runs: bool = True

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class CriticalPath(msgspec.Struct, frozen=True):
    segments: tuple[Segment, ...]
    by_kind: dict[str, float]
    by_directive: dict[str, float]
    by_track: dict[str, float]
    seconds: float


def critical_path(causes: Causes) -> CriticalPath:
    """From the span that ends last back to the step's begin; its parts sum up to the step."""
    segments = tuple(reversed(list(_backwards(causes))))
    timeline = causes.timeline

    def label(segment: Segment) -> Label:
        return causes.span(Place(segment.track, segment.span)).label

    return CriticalPath(
        segments,
        _sums(segments, lambda s: kind_of(label(s)) if s.runs else WAITING),
        _sums(segments, lambda s: timeline.origin(label(s)) if s.runs else WAITING),
        _sums(segments, lambda s: timeline.tracks[s.track].name),
        sum(segment.seconds for segment in segments),
    )


def kind_of(label: Label) -> str:
    """A phase of computation, or the kind of a task."""
    return label.phase or label.kind


def _backwards(causes: Causes) -> Iterator[Segment]:
    ended, at = causes.last, causes.span(causes.last).end
    if causes.end > at:
        yield _waiting(ended, at, causes.end, "begin")
    while True:
        late = causes.last_to_come(ended)
        began = min(causes.came(late), at)
        why: Why = "peer" if late != ended else causes.cause(ended).why
        yield Segment(ended.track, ended.span, began, at, why)
        found = yield from _start(causes, late, began)
        if found is None:
            return
        ended, at = found


def _start(causes: Causes, place: Place, at: float) -> _Found:
    """What a span's start waited for: the span, and when it was over; None at the step's begin."""
    while True:
        cause = causes.cause(place)
        if cause.at < at:
            yield _waiting(place, cause.at, at, cause.why)
        at = min(cause.at, at)
        if cause.place is None:
            return None
        if cause.why != "host":
            return cause.place, at
        if not causes.host_computes:
            read = causes.read_before(cause.place)
            over = causes.begin if read is None else causes.span(read).end
            yield _waiting(cause.place, min(over, at), at, "host")
            return None if read is None else (read, over)
        if not causes.span(cause.place).label.communicates:
            return cause.place, at
        place = cause.place  # the host had only started it


_Found = Generator[Segment, None, tuple[Place, float] | None]


def _waiting(place: Place, begin: float, end: float, why: Why) -> Segment:
    return Segment(place.track, place.span, begin, end, why, False)


def _sums(segments: tuple[Segment, ...], name: Callable[[Segment], str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for segment in segments:
        found[name(segment)] += segment.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))
