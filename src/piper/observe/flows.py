"""Flows: a timeline in; which spans are ends of one message or members of one collective, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from piper.observe.timeline import Timeline


class Place(NamedTuple):
    """Span number `span` of track number `track`."""

    track: int
    span: int


class Flow(NamedTuple):
    """A message from the first place to the second, or a collective's members by their starts."""

    message: bool
    places: tuple[Place, ...]


def flows(timeline: Timeline) -> Iterator[Flow]:
    """Spans meet if they have one `meeting` and are its n-th of one step on their tracks."""
    meetings: dict[tuple[str, int, int], tuple[list[Place], list[Place]]] = {}
    for number, track in enumerate(timeline.tracks):
        names = [(label.meeting, label.receives) for label in track.labels]
        for step, spans in enumerate(_steps_of(track.begins, len(track))):
            seen: dict[tuple[str, bool], int] = defaultdict(int)
            for span in spans:
                end = names[track.which[span]]
                if end[0]:
                    ends = meetings.setdefault((end[0], step, seen[end]), ([], []))
                    ends[end[1]].append(Place(number, span))
                    seen[end] += 1
    for sent, received in meetings.values():
        if received:
            # Equal numbers pair up in order; one class may also send to several, or the reverse.
            for index, place in enumerate(received if sent else []):
                yield Flow(True, (sent[index * len(sent) // len(received)], place))
        elif len(sent) > 1:
            members = sorted(sent, key=lambda p: timeline.tracks[p.track].start[p.span])
            yield Flow(False, tuple(members))


def _steps_of(begins: list[int], spans: int) -> Iterator[range]:
    bounds = [0, *begins, spans]
    return (range(first, last) for first, last in pairwise(bounds))
