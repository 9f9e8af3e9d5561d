"""Reason text: gaps, a task's spans, the critical path and what-ifs in; the words for them, out.

Times are milliseconds from the begin of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.insight.causes import Causes, Why
from piper.insight.critical_path import CriticalPath, Segment
from piper.insight.gaps import Gap, Link
from piper.insight.step_text import show_seconds
from piper.insight.task_spans import TaskSpan
from piper.insight.what_if import WhatIf
from piper.observe.flows import Place

_NEEDS: dict[Why, str] = {
    "data": "needs",
    "stream": "is behind, on its stream,",
    "host": "is behind, on its host,",
    "peer": "waits for its peer",
    "begin": "begins the step with",
    "end": "has nothing left to compute; the step ends with",
}
_FOLLOWS: dict[Why, str] = {
    "data": "needed by",
    "stream": "before, on its stream,",
    "host": "before, on its host,",
    "peer": "came last for",
    "begin": "before",
    "end": "before",
}


def gap_text(causes: Causes, gap: Gap, *, most: int = 200) -> Iterator[str]:
    """Why a rank does nothing: a line per link of the chain."""
    until = f"until {gap.after}" if gap.after != "the step's end" else "until the step's end"
    yield f"{gap.track} computes nothing from {_range(causes, gap.begin, gap.end)}, {until}"
    if not gap.chain:
        yield "  nothing that it waits for was missing: its host did something else"
    for number, link in enumerate(gap.chain[:most]):
        who = "it" if not number else "which"
        yield f"  {who} {_NEEDS[link.why]} {_link(causes, link)}"
    if len(gap.chain) > most:
        last = gap.chain[-1]
        yield f"  and so on, {len(gap.chain) - most} more, back to {_link(causes, last)}"


def busy_text(causes: Causes, rank: int, time: float) -> str:
    """What a rank computes at a time."""
    number = causes.track_number(rank)
    track = causes.timeline.tracks[number]
    time = min(time, causes.end)
    for index in causes.spans[number]:
        span = track[index]
        if span.start <= time <= span.end and not span.label.communicates:
            where = _range(causes, span.start, span.end)
            origin = causes.timeline.origin(span.label)
            return f"{track.name} is not idle then: {span.label.name} runs from {where} ({origin})"
    return f"{track.name} is not idle then"


def task_text(causes: Causes, span: TaskSpan) -> Iterator[str]:
    yield f"{span.task} on {span.track} ({span.kind} on stream {span.stream}, {span.directive})"
    if span.begin > span.came:
        yield f"  is there at {_at(causes, span.came)} and waits {show_seconds(span.begin - span.came)}"
    usual = f", {show_seconds(span.usual)} in most steps" if len(causes.timeline.steps) > 1 else ""
    where = _range(causes, span.begin, span.end)
    yield f"  runs from {where}: {show_seconds(span.seconds)}{usual}"
    for link in span.waited_for:
        yield f"  {_NEEDS[link.why]} {_link(causes, link)}"
    for link in span.followed_by:
        yield f"  {_FOLLOWS[link.why]} {_link(causes, link)}"


def chain_text(causes: Causes, path: CriticalPath) -> Iterator[str]:
    """The critical path, a line per part, from the step's begin to its end."""
    rows = [_segment(causes, segment) for segment in path.segments]
    wide = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    for row in rows:
        left = "  ".join(f"{text:>{width}}" for text, width in zip(row[:3], wide[:3], strict=True))
        right = "  ".join(
            f"{text:<{width}}" for text, width in zip(row[3:5], wide[3:5], strict=True)
        )
        yield f"{left}  {right}  {row[5]}".rstrip()


def _segment(causes: Causes, segment: Segment) -> tuple[str, ...]:
    place = Place(segment.track, segment.span)
    label = causes.span(place).label
    name = label.name if segment.runs else f"(before {label.name})"
    origin = causes.timeline.origin(label) if segment.runs else ""
    return (
        _at(causes, segment.begin),
        _at(causes, segment.end),
        show_seconds(segment.seconds),
        causes.timeline.tracks[segment.track].name,
        name,
        origin,
    )


def what_if_text(found: Sequence[WhatIf]) -> Iterator[str]:
    first = found[0]
    if first.recorded is not None:
        yield (
            f"replayed from what its tasks took the step is {first.seconds * 1e3:.2f} ms; in the "
            f"timeline {first.recorded * 1e3:.2f} ms (no step is further off than {first.off:.1%})"
        )
    yield from map(str, found)


def _link(causes: Causes, link: Link) -> str:
    where = _range(causes, link.begin, link.end)
    return f"{link.task} on {link.track} ({where}; {link.directive})"


def _range(causes: Causes, begin: float, end: float) -> str:
    return f"{(begin - causes.begin) * 1e3:.3f} to {_at(causes, end)}"


def _at(causes: Causes, time: float) -> str:
    return f"{(time - causes.begin) * 1e3:.3f} ms"
