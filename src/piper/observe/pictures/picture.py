"""Picture: a timeline and a window in; rows of bars in time, and what their axis says, out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from piper.errors import FileError
from piper.ir.nodes import COMPUTE
from piper.observe.pictures.styles import STYLES, Style, short_name, style_of
from piper.observe.timeline import Label, Timeline, Track

_MOST_ROWS = 200  # of a plan; a table is drawn whole


class Bar(NamedTuple):
    """A span, or several `spans` too small to tell apart, of which `label` is the longest's and
    `length` its time."""

    row: int
    start: float
    end: float
    label: Label
    length: float
    spans: int = 1


class Unit(NamedTuple):
    name: str
    per_second: float


@dataclass
class Picture:
    """One row for each stream of each track. Times are those of the timeline, from `begin` to `end`."""

    timeline: Timeline
    tracks: list[Track]
    heads: list[str]
    begin: float
    end: float
    left_out: int

    @property
    def of_table(self) -> bool:
        """Of a schedule: drawn so large that every name fits. A plan is drawn to fit its frame."""
        return self.timeline.source == "table"

    @property
    def length(self) -> float:
        return self.end - self.begin

    @property
    def unit(self) -> Unit:
        if not self.timeline.unit:
            return Unit("", 1)
        if self.length >= 2:
            return Unit("s", 1)
        return Unit("ms", 1e3) if self.length >= 2e-3 else Unit("µs", 1e6)

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Where steps begin in the window, if there are several."""
        begins = [(n, begin) for n, (begin, _) in enumerate(self.timeline.steps)]
        inside = [(n, begin) for n, begin in begins if self.begin <= begin < self.end]
        return inside if len(begins) > 1 else []

    @property
    def rest(self) -> str:
        """What it leaves out, in words."""
        return f"and {self.left_out} more rows; choose ranks to see them" if self.left_out else ""

    def name(self, label: Label) -> str:
        return label.name if self.of_table else short_name(label)

    def bars(self, finest: float = 0.0) -> Iterator[Bar]:
        """All that lie in the window; shorter ones than `finest` that are as near become one."""
        first = 0
        for track in self.tracks:
            streams = _streams(track)
            if first + len(streams) > len(self.heads):
                return
            yield from _merged(self._bars_of(track, first, streams), finest, self.begin)
            first += len(streams)

    def _bars_of(self, track: Track, first: int, streams: list[str]) -> Iterator[Bar]:
        rows = {stream: first + index for index, stream in enumerate(streams)}
        row_of = [rows.get(label.stream, -1) for label in track.labels]
        left, right, labels = self.begin, self.end, track.labels
        for which, start, end in zip(track.which, track.start, track.end, strict=True):
            if (start < right and end > left) or left <= start == end <= right:
                yield Bar(row_of[which], start, end, labels[which], end - start)

    def place(self, scale: float) -> Callable[[float], float]:
        """From a time to its place in the window."""
        begin, end = self.begin, self.end
        return lambda time: (min(max(time, begin), end) - begin) * scale

    def ticks(self, length: float, *, about: int) -> list[tuple[float, str]]:
        """About so many round times of the window's first `length`, each with its text."""
        factor = self.unit.per_second
        found = ticks(self.begin * factor, (self.begin + length) * factor, about=about)
        return [(time / factor, number(time)) for time in found]


def picture(
    timeline: Timeline,
    *,
    begin: float | None = None,
    end: float | None = None,
    ranks: Collection[int] | None = None,
) -> Picture:
    """Of some ranks, or all, between two times of the timeline, or from its begin to its end."""
    tracks = timeline.tracks
    if ranks is not None:
        wanted = {id(timeline.track_of(rank)) for rank in ranks}
        tracks = [track for track in tracks if id(track) in wanted]
    steps = timeline.steps
    firsts = [track.first for track in timeline.tracks if len(track)]
    lasts = [track.last for track in timeline.tracks if len(track)]
    left = min(firsts + [begin for begin, _ in steps[:1]], default=0.0)
    right = max(lasts + [end for _, end in steps[-1:]], default=0.0)
    left, right = left if begin is None else begin, right if end is None else end
    if not left <= right:
        raise FileError(f"a picture from {left:g} to {right:g}", legal="a begin before its end")
    streams = [(track, _streams(track)) for track in tracks]
    plain = all(names in ([], [COMPUTE]) for _, names in streams)
    heads = [t.name if plain else f"{t.name} {name}" for t, names in streams for name in names]
    shown = heads
    if timeline.source != "table":
        counts = [len(names) for _, names in streams]
        shown = heads[: _whole_tracks(counts, _MOST_ROWS)]
    return Picture(timeline, tracks, shown, left, right, len(heads) - len(shown))


def styles_of(labels: Collection[Label]) -> list[Style]:
    """Those that a picture of the labels needs, for its legend."""
    used = {style_of(label) for label in labels}
    return [style for style in STYLES.values() if style in used]


def ticks(begin: float, end: float, *, about: int) -> list[float]:
    """About so many round times from begin to end."""
    if end <= begin:
        return [begin]
    step, factor = 10.0**-9, 0
    while (end - begin) / step > about:
        step *= (2, 2.5, 2)[factor % 3]
        factor += 1
    first = math.ceil(begin / step - 1e-9)
    return [i * step for i in range(first, int(end / step + 1e-9) + 1)]


def number(time: float) -> str:
    """As short as it can be without being another time."""
    short = f"{time:g}"
    return short if math.isclose(float(short), time) else f"{time:.12g}"


def _streams(track: Track) -> list[str]:
    return sorted(track.streams, key=lambda stream: stream != COMPUTE)


def _whole_tracks(counts: list[int], most: int) -> int:
    """How many rows the first tracks have that fit, one track at least."""
    rows = 0
    for count in counts:
        if rows and rows + count > most:
            break
        rows += count
    return rows


def _merged(bars: Iterator[Bar], finest: float, begin: float) -> Iterator[Bar]:
    if not finest:
        yield from bars
        return
    small: dict[int, tuple[int, Bar]] = {}  # row -> where, and what lies there
    for bar in bars:
        if bar.length >= finest:
            yield bar
            continue
        at = int((bar.start - begin) // finest)
        place, other = small.get(bar.row, (None, None))
        if other is not None and place == at:
            longest = bar if bar.length > other.length else other
            bar = Bar(
                bar.row, min(bar.start, other.start), max(bar.end, other.end),
                longest.label, longest.length, other.spans + 1,
            )  # fmt: skip
        elif other is not None:
            yield other
        small[bar.row] = (at, bar)
    for _, other in small.values():
        yield other
