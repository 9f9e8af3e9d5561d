"""Step shares: a step of a timeline in; how much of it ranks compute, move data with nothing beside it,
and do neither, out."""

from __future__ import annotations

import msgspec

from piper.insight.use_of_time import length, union
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Timeline


class StepShares(msgspec.Struct, frozen=True):
    """Of a step's seconds, over all ranks; they sum up to 1. A communication is exposed while it moves
    data and its rank computes nothing; before all its members are there it is part of the bubble."""

    seconds: float
    computing: float
    exposed: float
    bubble: float


def step_shares(timeline: Timeline, step: int) -> StepShares:
    begin, end = timeline.steps[step]
    seconds = end - begin
    meetings = Meetings(timeline, step)
    computing = exposed = ranks = 0.0
    for number, track in enumerate(timeline.tracks):
        busy, moving = [], []
        for span in meetings.spans[number]:
            if track.labels[track.which[span]].communicates:
                place = Place(number, span)
                moving.append((meetings.began(place), meetings.ended(place)))
            else:
                busy.append((track.start[span], track.end[span]))
        computes = union(busy)
        alone = length(union([*computes, *union(moving)])) - length(computes)
        computing += length(computes) * len(track.ranks)
        exposed += alone * len(track.ranks)
        ranks += len(track.ranks)
    whole = seconds * ranks or 1.0
    shares = computing / whole, exposed / whole
    return StepShares(seconds, *shares, max(0.0, 1.0 - sum(shares)))
