"""Task spans: a task's name in; on every track when it ran, what it waited for and who for it, out."""

from __future__ import annotations

from statistics import median

import msgspec

from piper.insight.causes import Causes
from piper.insight.gaps import Link, link_of
from piper.observe.flows import Place
from piper.plan.report.find import find_tasks


class TaskSpan(msgspec.Struct, frozen=True):
    """A task on one track in a step. `came` is when this rank was ready, `begin` when all members of a
    communication were; `usual` the median of its seconds from then on over all steps."""

    track: str
    task: str
    kind: str
    stream: str
    directive: str
    came: float
    begin: float
    end: float
    usual: float
    waited_for: tuple[Link, ...]
    followed_by: tuple[Link, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def task_spans(causes: Causes, name: str) -> list[TaskSpan]:
    """Of the task of this name, or start or end of a name."""
    found, index = find_tasks(causes.plan, name)[0]
    meant = found.tasks[index].name
    others = [Causes(causes.plan, causes.timeline, step) for step in causes.timeline.settled]
    return [
        _span(causes, others, Place(number, span))
        for number, track in enumerate(causes.timeline.tracks)
        for span in causes.spans[number]
        if track.labels[track.which[span]].name == meant
    ]


def _span(causes: Causes, others: list[Causes], place: Place) -> TaskSpan:
    track = causes.timeline.tracks[place.track]
    label = track.labels[track.which[place.span]]
    at = place.span - causes.spans[place.track].start
    took = []
    for other in others:
        same = Place(place.track, other.spans[place.track].start + at)
        took.append(track.end[same.span] - other.began(same))
    return TaskSpan(
        track.name,
        label.name,
        label.kind,
        label.stream,
        causes.timeline.origin(label),
        causes.came(place),
        causes.began(place),
        track.end[place.span],
        median(took),
        tuple(_before(causes, place)),
        tuple(_after(causes, place)),
    )


def _before(causes: Causes, place: Place) -> list[Link]:
    """What the start waited for on its own rank, then the member that came last."""
    found = []
    cause = causes.cause(place)
    if cause.place is not None:
        found.append(link_of(causes, cause.place, cause.why))
    late = causes.last_to_come(place)
    if late != place:
        found.append(link_of(causes, late, "peer"))
    return found


def _after(causes: Causes, place: Place) -> list[Link]:
    """Those whose start waited for this one last, and members for which it came last."""
    found = []
    for span in causes.spans[place.track]:
        cause = causes.cause(Place(place.track, span))
        if cause.place == place:
            found.append(link_of(causes, Place(place.track, span), cause.why))
    if causes.last_to_come(place) == place:
        others = (member for member in causes.members(place) if member.track != place.track)
        found += [link_of(causes, other, "peer") for other in others]
    return found
