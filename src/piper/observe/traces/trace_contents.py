"""Trace contents: a timeline in; processes, threads, arguments and whole times for trace viewers out.

Viewers want the slices of a thread to nest. Spans of one stream that overlap, such as messages on their
way at the same time, get threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper.observe.timeline import Label, Timeline, Track

Arguments = dict[str, str | int | dict[str, int]]
STEPS = 1
_PER_SECOND = 10**9
_PER_TABLE_UNIT = 10**6  # a table's unit of time is shown as 1 ms


@dataclass
class Thread:
    """Spans that follow each other, by number."""

    number: int
    name: str
    spans: list[int]


@dataclass
class Process:
    """One track: its threads, and the nanoseconds at which its spans begin and end."""

    number: int
    name: str
    track: Track
    start: list[int]
    end: list[int]
    threads: list[Thread]


@dataclass
class Contents:
    """Of a whole timeline. No two processes or threads have one number; STEPS is left for the steps."""

    timeline: Timeline
    processes: list[Process]
    steps: list[tuple[int, int]]
    origin: float
    scale: int

    def nanoseconds(self, times: Sequence[float]) -> list[int]:
        origin, scale = self.origin, self.scale
        return [round((time - origin) * scale) for time in times]


def contents(timeline: Timeline) -> Contents:
    tracks = timeline.tracks
    times = [track.first for track in tracks if len(track)] + [begin for begin, _ in timeline.steps]
    times += [column.times[0] for t in tracks for column in t.memory.values() if column.times]
    origin = min(times + [0.0])  # viewers know no times before 0
    scale = _PER_SECOND if timeline.unit else _PER_TABLE_UNIT
    whole = Contents(timeline, [], [], origin, scale)
    begins, ends = zip(*timeline.steps, strict=True) if timeline.steps else ((), ())
    whole.steps = list(zip(whole.nanoseconds(begins), whole.nanoseconds(ends), strict=True))
    threads = STEPS + len(tracks)
    for number, track in enumerate(tracks, STEPS + 1):
        start, end = whole.nanoseconds(track.start), whole.nanoseconds(track.end)
        process = Process(number, _name(track), track, start, end, [])
        for stream, spans in _by_stream(track).items():
            for lane, inside in enumerate(lanes(spans, start, end)):
                threads += 1
                name = f"{stream} {lane + 1}" if lane else stream
                process.threads.append(Thread(threads, name, inside))
        whole.processes.append(process)
    return whole


def arguments(timeline: Timeline, label: Label) -> Arguments:
    """What a viewer shows of a slice beside its name and times."""
    found: Arguments = {"kind": label.kind, "directive": timeline.origin(label)}
    if label.phase:
        found["phase"] = label.phase
    if label.microbatch is not None:
        found["microbatch"] = label.microbatch
    if label.nbytes:
        found["bytes"] = label.nbytes
    if label.meeting:
        found["communication"] = label.meeting
    if label.tags:
        found["tags"] = dict(label.tags)
    return found


def run_arguments(timeline: Timeline) -> Arguments:
    """What is true of all of it, for the slices of its steps."""
    found: Arguments = {"source": timeline.source}
    if timeline.plan:
        found["plan"] = timeline.plan
    if timeline.clock_error:
        found["clock error ns"] = round(timeline.clock_error * _PER_SECOND)
    if not timeline.unit:
        found["1 ms"] = "one unit of the table"
    return found


def category(label: Label) -> str:
    return label.kind if label.communicates else label.phase or label.kind


def lanes(spans: Iterable[int], start: Sequence[int], end: Sequence[int]) -> list[list[int]]:
    """The spans in as few rows without overlap as their order allows."""
    ordered = sorted(spans, key=lambda span: (start[span], end[span]))
    rows: list[list[int]] = []
    for span in ordered:
        for row in rows:
            if end[row[-1]] <= start[span]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _by_stream(track: Track) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {stream: [] for stream in track.streams}
    home = [found.get(label.stream, []) for label in track.labels]
    for span, which in enumerate(track.which):
        home[which].append(span)
    return found


def _name(track: Track) -> str:
    if len(track.ranks) < 2:
        return track.name
    first, last = min(track.ranks), max(track.ranks)
    shown = (
        f"{first} to {last}" if last - first + 1 == len(track.ranks) else f"{first}, ..., {last}"
    )
    return f"{track.name} ({len(track.ranks)} ranks: {shown})"
