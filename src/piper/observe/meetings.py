"""Meetings: one step of a timeline in; who takes part in each communication, who came last and when it
was over, out."""

from __future__ import annotations

from collections import defaultdict

from piper.observe.flows import Place
from piper.observe.timeline import Span, Timeline


class Meetings:
    """Of one step."""

    def __init__(self, timeline: Timeline, step: int) -> None:
        self.timeline = timeline
        self.spans = [track.step(step) for track in timeline.tracks]
        self.host_computes = timeline.host_computes
        self._members: dict[str, list[Place]] = defaultdict(list)
        self._last: dict[str, Place] = {}
        self._over: dict[str, float] = {}
        for number, track in enumerate(timeline.tracks):
            names = [label.meeting for label in track.labels]
            for span in self.spans[number]:
                name = names[track.which[span]]
                if name:
                    self._members[name].append(Place(number, span))

    def span(self, place: Place) -> Span:
        return self.timeline.tracks[place.track][place.span]

    def _name(self, place: Place) -> str:
        track = self.timeline.tracks[place.track]
        return track.labels[track.which[place.span]].meeting

    def members(self, place: Place) -> list[Place]:
        """All spans of a communication, on all tracks; of a computation, itself."""
        name = self._name(place)
        return self._members[name] if name else [place]

    def last_to_come(self, place: Place) -> Place:
        """The member for which a communication waited."""
        name = self._name(place)
        if not name:
            return place
        if name not in self._last:
            self._last[name] = max(self._members[name], key=self.came)
        return self._last[name]

    def came(self, place: Place) -> float:
        """When a span was ready on its own rank: a host that computes has then started it."""
        track = self.timeline.tracks[place.track]
        if not self.host_computes:
            return track.start[place.span]
        return max(track.start[place.span], min(track.issued[place.span], track.end[place.span]))

    def began(self, place: Place) -> float:
        """When a span could go on: for a communication, when all its members were there."""
        return self.came(self.last_to_come(place))

    def ended(self, place: Place) -> float:
        """When a communication was over, as who saw it first says; of a message, its receiver: a sender
        may be through with it before."""
        name = self._name(place)
        if not name:
            return self.timeline.tracks[place.track].end[place.span]
        if name not in self._over:
            spans = [self.span(member) for member in self._members[name]]
            ends = [span.end for span in spans if span.label.receives]
            self._over[name] = min(ends or (span.end for span in spans))
        return self._over[name]
