"""Use of time: a step of a timeline in; how much of it each track computes, waits for communication, or
does nothing, out."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from piper.insight.critical_path import kind_of
from piper.observe.timeline import Timeline


class TrackUse(msgspec.Struct, frozen=True):
    """Seconds of one track in a step: they sum up to it. `exposed` is communication beside which nothing
    is computed; `hidden` is communication beside computation, and part of `computing`. `held` is how
    long its host was held until something was complete: 0 in a simulation, which does not say."""

    track: str
    seconds: float
    computing: float
    exposed: float
    idle: float
    hidden: float
    held: float
    by_kind: dict[str, float]


def use_of_time(timeline: Timeline, step: int = -1) -> list[TrackUse]:
    """A communication counts while it is under way, also while it waits for its peers."""
    step %= len(timeline.steps)
    begin, end = timeline.steps[step]
    found = []
    for track in timeline.tracks:
        computing: list[tuple[float, float]] = []
        talking: list[tuple[float, float]] = []
        by_kind: dict[str, float] = {}
        held = 0.0
        for index in track.step(step):
            span = track[index]
            (talking if span.label.communicates else computing).append((span.start, span.end))
            held += span.waited
            kind = kind_of(span.label)
            by_kind[kind] = by_kind.get(kind, 0.0) + span.seconds
        busy, under_way = union(computing), union(talking)
        both = length(busy) + length(under_way) - length(union([*busy, *under_way]))
        exposed = length(under_way) - both
        found.append(
            TrackUse(
                track.name,
                end - begin,
                length(busy),
                exposed,
                max(0.0, end - begin - length(busy) - exposed),
                both,
                held,
                dict(sorted(by_kind.items(), key=lambda item: -item[1])),
            )
        )
    return found


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
