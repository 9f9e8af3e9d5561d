"""Step shares: a step of a timeline in; how much of it ranks compute, move data with nothing beside it,
and do neither, out."""

from __future__ import annotations

import msgspec

from piper.insight.use_of_time import length, union
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Timeline


class Shares(msgspec.Struct, frozen=True):
    """Of a step's seconds, for one rank or as the mean of several; with the bubble they sum up to 1. A
    communication is exposed while it moves data and its rank computes nothing; before all its members
    are there it is part of the bubble."""

    computing: float
    exposed: float
    bubble: float


class StepShares(msgspec.Struct, frozen=True):
    """Of all ranks, and of each track."""

    seconds: float
    ranks: Shares
    tracks: list[Shares]


def step_shares(timeline: Timeline, step: int) -> StepShares:
    begin, end = timeline.steps[step]
    meetings = Meetings(timeline, step)
    found = [_of_track(meetings, number, end - begin) for number in range(len(timeline.tracks))]
    sizes = [len(track.ranks) for track in timeline.tracks]

    def mean(values: list[float]) -> float:
        return sum(a * b for a, b in zip(values, sizes, strict=True)) / (sum(sizes) or 1)

    computing, exposed = mean([s.computing for s in found]), mean([s.exposed for s in found])
    return StepShares(end - begin, _shares(computing, exposed), found)


def _of_track(meetings: Meetings, number: int, seconds: float) -> Shares:
    track = meetings.timeline.tracks[number]
    busy, moving = [], []
    for span in meetings.spans[number]:
        if track.labels[track.which[span]].communicates:
            place = Place(number, span)
            moving.append((meetings.began(place), meetings.ended(place)))
        else:
            busy.append((track.start[span], track.end[span]))
    computes = union(busy)
    alone = length(union([*computes, *union(moving)])) - length(computes)
    whole = seconds or 1.0
    return _shares(length(computes) / whole, alone / whole)


def _shares(computing: float, exposed: float) -> Shares:
    return Shares(computing, exposed, max(0.0, 1.0 - computing - exposed))
