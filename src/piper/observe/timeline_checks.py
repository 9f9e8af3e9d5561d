"""Timeline checks: a Timeline in; one error that names what cannot be true of it out."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise
from operator import le
from typing import TYPE_CHECKING

from piper.errors import FileError

if TYPE_CHECKING:
    from piper.observe.timeline import Timeline, Track

LATEST = 1e12  # seconds, before or after the first step


def check_timeline(timeline: Timeline) -> None:
    for begin, end in timeline.steps:
        if not -LATEST <= begin <= end <= LATEST:
            raise FileError(f"a timeline with a step from {begin} to {end} s")
    if not 0 <= timeline.clock_error <= LATEST:
        raise FileError(f"a timeline with clocks that are {timeline.clock_error} s apart")
    if timeline.steps and not timeline.tracks:
        raise FileError("a timeline with steps, but without tracks")
    seen: set[int] = set()
    for track in timeline.tracks:
        problem = (
            _of_ranks(track, seen)
            or _of_spans(track)
            or _of_steps(track, len(timeline.steps))
            or _of_memory(track)
        )
        if problem:
            raise FileError(f"a timeline whose {track.name} {problem}")


def _of_ranks(track: Track, seen: set[int]) -> str:
    if not track.ranks or min(track.ranks) < 0:
        return f"is of the ranks {list(track.ranks)}"
    known = len(seen)
    seen.update(track.ranks)
    if len(seen) != known + len(track.ranks):
        return "has a rank that is also elsewhere"
    return ""


def _of_spans(track: Track) -> str:
    sizes = {len(track.which), len(track.issued), len(track.start), len(track.end)}
    sizes |= {len(track.waited)} if track.waited else set()
    if len(sizes) != 1:
        return "has columns of different lengths"
    if track.which and max(track.which) >= len(track.labels):
        return "has a span without a label"
    for name in ("issued", "start", "end", "waited"):
        if not _are_times(getattr(track, name)):
            return f"has a time in `{name}` that no clock shows"
    if not all(map(le, track.start, track.end)):
        return "has a span that ends before it starts"
    if min(track.waited, default=0.0) < 0:
        return "has a host that waited less than no time"
    return ""


def _of_steps(track: Track, steps: int) -> str:
    begins = track.begins
    if len(begins) != steps:
        return f"has {len(begins)} steps, the timeline {steps}"
    if begins and (begins[0] or any(a > b for a, b in pairwise([*begins, len(track)]))):
        return f"has steps that begin at the spans {begins}, of {len(track)}"
    return ""


def _of_memory(track: Track) -> str:
    for name, column in track.memory.items():
        times = column.times
        if len(times) != len(column.nbytes):
            return f"has {len(times)} times of {name}, and {len(column.nbytes)} sizes"
        if not _are_times(times) or any(a > b for a, b in pairwise(times)):
            return f"has times of {name} that are not in order"
        if min(column.nbytes, default=0) < 0:
            return f"has less than nothing of {name}"
    return ""


def _are_times(column: array[float]) -> bool:
    """Their sum shows whether any is no number."""
    if not column:
        return True
    return min(column) >= -LATEST and max(column) <= LATEST and not math.isnan(sum(column))
