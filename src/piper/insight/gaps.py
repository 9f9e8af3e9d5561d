"""Gaps: a rank and a time in; why it computes nothing then, over all ranks that it waits for, out."""

from __future__ import annotations

import msgspec

from piper.errors import FileError
from piper.insight.causes import Causes, Why
from piper.observe.flows import Place

_LONGEST = 200
_SHOWN = 0.5e-6  # seconds, to which times are rounded when they are shown


class Link(msgspec.Struct, frozen=True):
    """One step of an explanation: a task of a track, from when to when, and why the one before it in the
    list waited for it."""

    track: str
    task: str
    begin: float
    end: float
    why: Why
    directive: str
    stream: str


class Gap(msgspec.Struct, frozen=True):
    """A time in which a rank computes nothing: between two tasks, and the chain of what the second
    waited for, up to what was under way in the gap."""

    track: str
    begin: float
    end: float
    before: str
    after: str
    chain: tuple[Link, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def gap_at(causes: Causes, rank: int, time: float) -> Gap | None:
    """The gap of a rank at a time of the timeline; None if it computes then."""
    number = causes.track_number(rank)
    if not causes.begin <= time <= causes.end + _SHOWN:
        raise FileError(
            f"{(time - causes.begin) * 1e3:g} ms is not in the step",
            legal=f"from 0 to {(causes.end - causes.begin) * 1e3:.3f} ms",
        )
    for gap in _gaps(causes, number, 0.0):
        if gap[0] <= time < gap[1] or time >= gap[1] == causes.end:
            return _explained(causes, number, *gap)
    return None


def largest_gaps(causes: Causes, *, most: int = 10, rank: int | None = None) -> list[Gap]:
    """The longest ones of all ranks, or of one."""
    numbers = range(len(causes.timeline.tracks)) if rank is None else [causes.track_number(rank)]
    found = [(n, *gap) for n in numbers for gap in _gaps(causes, n, 0.0)]
    found.sort(key=lambda gap: gap[1] - gap[2])  # the longest first
    return [_explained(causes, *gap) for gap in found[:most]]


_Between = tuple[float, float, Place | None, Place | None]


def _gaps(causes: Causes, number: int, least: float) -> list[_Between]:
    """Where no task computes: begin, end, and the tasks before and after."""
    track = causes.timeline.tracks[number]
    busy = sorted(
        (track.start[i], track.end[i], i)
        for i in causes.spans[number]
        if not track.labels[track.which[i]].communicates
    )
    found: list[_Between] = []
    upto, last = causes.begin, None
    for start, end, span in busy:
        if start - upto > least:
            found.append((upto, start, last, Place(number, span)))
        if end > upto:
            upto, last = end, Place(number, span)
    if causes.end - upto > least:
        found.append((upto, causes.end, last, None))
    return found


def _explained(
    causes: Causes,
    number: int,
    begin: float,
    end: float,
    before: Place | None,
    after: Place | None,
) -> Gap:
    name = causes.timeline.tracks[number].name
    return Gap(
        name,
        begin,
        end,
        "the step's begin" if before is None else causes.span(before).label.name,
        "the step's end" if after is None else causes.span(after).label.name,
        tuple(_chain(causes, after, begin) if after is not None else _end(causes, begin)),
    )


def _end(causes: Causes, begin: float) -> list[Link]:
    """A rank that has nothing left to compute waits for what ends last, be it its own."""
    last = causes.last
    return [link_of(causes, last, "end"), *_chain(causes, last, begin)]


def _chain(causes: Causes, place: Place, begin: float) -> list[Link]:
    """Back from a task's start, as long as what it waited for was not over when the gap began."""
    found: list[Link] = []
    while len(found) <= _LONGEST:
        cause = causes.cause(place)
        if cause.place is None or cause.at <= begin:
            return found
        ended = cause.place
        if cause.why == "host" and not causes.host_computes:
            read = causes.read_before(ended)
            if read is None or causes.span(read).end <= begin:
                return [*found, _starting(causes, ended, cause.at)]
            ended = read
        elif cause.why == "host" and causes.span(ended).label.communicates:
            found.append(_starting(causes, ended, cause.at))
            place = ended  # the host had only started it
            continue
        found.append(link_of(causes, ended, cause.why))
        late = causes.last_to_come(ended)
        if late != ended:
            found.append(link_of(causes, late, "peer"))
        if causes.span(late).start <= begin:
            return found
        place = late
    return found


def _starting(causes: Causes, place: Place, until: float) -> Link:
    """A host that is busy with handing out a task, whenever that runs."""
    link = link_of(causes, place, "host")
    start = min(causes.span(place).start, until)
    return msgspec.structs.replace(link, begin=start, end=until)


def link_of(causes: Causes, place: Place, why: Why) -> Link:
    span, track = causes.span(place), causes.timeline.tracks[place.track]
    return Link(
        track.name,
        span.label.name,
        causes.began(place),
        span.end,
        why,
        causes.timeline.origin(span.label),
        span.label.stream,
    )
