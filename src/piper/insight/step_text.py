"""Step text: a plan and a timeline of it in; where the time of a step goes, in lines, out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from piper.insight.causes import Causes
from piper.insight.critical_path import CriticalPath, critical_path
from piper.insight.exposed import Exposed, exposed
from piper.insight.use_of_time import TrackUse, use_of_time
from piper.ir.form.byte_sizes import show_size
from piper.plan.types import Plan

_SHOWN = 8
_MOST_TRACKS = 16


def show_seconds(seconds: float) -> str:
    """`12.3 ms`, `1.25 s`, `8.1 µs`."""
    size, unit = 1e-6, "µs"
    for larger, name in ((1e-3, "ms"), (1.0, "s")):
        if abs(seconds) >= 0.9995 * larger:  # what would round to 1000 of the smaller unit
            size, unit = larger, name
    return f"{seconds / size:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"


def step_text(plan: Plan, causes: Causes) -> str:
    return "\n".join(_lines(plan, causes))


def _lines(plan: Plan, causes: Causes) -> Iterator[str]:
    timeline = causes.timeline
    seconds = causes.end - causes.begin
    yield f"{timeline.source} step: {show_seconds(seconds)}"
    yield from used(use_of_time(timeline, causes.step))
    yield from exposed_text(exposed(causes))
    path = critical_path(causes)
    yield from path_text(path)


def used(found: list[TrackUse]) -> Iterator[str]:
    """A line per track."""
    wide = max((len(use.track) for use in found), default=0)
    for use in found[:_MOST_TRACKS]:
        share = {
            "computes": use.computing,
            "waits for communication": use.exposed,
            "idle": use.idle,
        }
        step = use.seconds or math.inf  # of no length if nothing takes any time
        parts = ", ".join(f"{name} {value / step:.1%}" for name, value in share.items())
        whole = use.exposed + use.hidden
        hidden = f"; {use.hidden / whole:.0%} of communication hidden" if whole else ""
        held = f"; host held {use.held / step:.1%}" if use.held else ""
        yield f"  {use.track:<{wide}}  {parts}{hidden}{held}"
    if len(found) > _MOST_TRACKS:
        yield f"  and {len(found) - _MOST_TRACKS} more"


def exposed_text(rows: Sequence[Exposed]) -> Iterator[str]:
    """What communication nothing hides, by kind and directive, on the track that has most of it."""
    left = [row for row in rows if row.exposed > 0]
    if not left:
        if rows:
            yield "exposed communication: none"
        return
    seconds, nbytes = sum(row.exposed for row in left), sum(row.exposed_bytes for row in left)
    yield f"exposed communication of {left[0].track}: {show_seconds(seconds)}, {show_size(nbytes)}"
    for row in left[:_SHOWN]:
        yield (
            f"    {show_seconds(row.exposed):>9}  {row.exposed / row.seconds:6.1%}  {row.kind}, "
            f"{show_size(row.exposed_bytes)} of {show_size(row.nbytes)}: {row.directive}"
        )


def path_text(path: CriticalPath) -> Iterator[str]:
    yield f"critical path: {len(path.segments)} parts"
    yield from _shares("by kind", path.by_kind, path.seconds)
    yield from _shares("by directive", path.by_directive, path.seconds)
    if len(path.by_track) > 1:
        yield from _shares("by rank", path.by_track, path.seconds)


def _shares(title: str, parts: Mapping[str, float], whole: float) -> Iterator[str]:
    yield f"  {title}:"
    for number, (name, seconds) in enumerate(parts.items()):
        if number == _SHOWN:
            yield f"    and {len(parts) - _SHOWN} more"
            return
        yield f"    {show_seconds(seconds):>9}  {seconds / whole if whole else 0:6.1%}  {name}"
