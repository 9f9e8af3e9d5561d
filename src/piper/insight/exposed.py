"""Exposed: a step of a timeline in; the communication that nothing is computed beside, by what caused
it, out."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import msgspec

from piper.insight.use_of_time import union
from piper.observe.flows import Place
from piper.observe.meetings import Meetings


class Exposed(msgspec.Struct, frozen=True):
    """Communication of one kind from one directive, on one track in one step: for how long it moves
    data, and for how much of that nothing is computed; the bytes likewise, as if they moved evenly."""

    track: str
    kind: str
    directive: str
    seconds: float
    exposed: float
    nbytes: int
    exposed_bytes: int


def exposed(found: Meetings) -> list[Exposed]:
    """Of the track where most is exposed, most first. A communication counts once all its members are
    there: until then it waits for them, which is no matter of what it moves."""
    tracks = (_of_track(found, number) for number in range(len(found.timeline.tracks)))
    return max(tracks, key=lambda rows: sum(row.exposed for row in rows), default=[])


def _of_track(found: Meetings, number: int) -> list[Exposed]:
    track = found.timeline.tracks[number]
    spans = [Place(number, index) for index in found.spans[number]]
    labels = {place: track.labels[track.which[place.span]] for place in spans}
    busy = union(
        (track.start[p.span], track.end[p.span]) for p in spans if not labels[p].communicates
    )
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for place in spans:
        label = labels[place]
        if label.communicates:
            begin, end = found.began(place), found.ended(place)
            alone = _without(begin, end, busy)
            share = alone / (end - begin) if end > begin else 0.0
            row = sums[label.kind, found.timeline.origin(label)]
            parts = (max(0.0, end - begin), alone, label.nbytes, share * label.nbytes)
            for at, part in enumerate(parts):
                row[at] += part
    rows = [
        Exposed(track.name, kind, by, seconds, alone, round(nbytes), round(alone_bytes))
        for (kind, by), (seconds, alone, nbytes, alone_bytes) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.exposed)


def _without(begin: float, end: float, busy: list[tuple[float, float]]) -> float:
    """How much of a time lies in none of the busy ones."""
    left = max(0.0, end - begin)
    at = max(0, bisect_right(busy, (begin,)) - 1)
    while at < len(busy) and busy[at][0] < end:
        left -= max(0.0, min(end, busy[at][1]) - max(begin, busy[at][0]))
        at += 1
    return max(0.0, left)
