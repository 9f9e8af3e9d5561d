"""Timeline: spans of every rank and stream, measured or simulated, and what each of them is of.

Spans lie in columns, a few numbers each, so that millions of them are little; a Label says once what
all spans of one task have in common. Times are seconds from the begin of the first step, but for
schedule tables, whose unit is theirs.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal, NamedTuple

import msgspec

from piper.errors import FileError
from piper.ir.nodes import TRACED, Tags
from piper.observe.timeline_checks import check_timeline

Source = Literal["measured", "simulated", "table"]
MICROBATCH = "MB"
_TABLE = re.compile(r"\{[^{}]{40,}\}")  # in a directive, too long for a line of text
_NOTEBOOK = 960  # pixels that a notebook has beside each other


class Label(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What spans are of: a task of a plan, or a cell of a schedule.

    `origin` is the number of the directive that made it; `nbytes` what a communication takes from or
    leaves on this rank; `meeting` what all members of a communication call it, and `receives` says that
    this one is a message's receiving end.
    """

    name: str
    kind: str
    stream: str
    phase: str = ""
    tags: Tags = ()
    origin: int = TRACED
    nbytes: int = 0
    meeting: str = ""
    receives: bool = False

    @property
    def microbatch(self) -> int | None:
        return next((value for name, value in self.tags if name == MICROBATCH), None)

    @property
    def communicates(self) -> bool:
        return bool(self.meeting)


class Span(NamedTuple):
    """One time that a task ran. `issued` is when its host was through with starting it, `start` when it
    began on its stream (a communication waits there for its peers), `end` when it was complete. Beside a
    host that computes, communication begins while it is issued. `waited` is how long the host was held
    until it was complete."""

    label: Label
    issued: float
    start: float
    end: float
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Column:
    """Bytes of one category over time: from `times[i]` on there are `nbytes[i]`."""

    times: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))

    def set(self, time: float, nbytes: int) -> None:
        """Times do not go back: steps may overlap, and then the later call counts."""
        if self.times and time <= self.times[-1]:
            self.nbytes[-1] = nbytes
        elif not self.nbytes or self.nbytes[-1] != nbytes:
            self.times.append(time)
            self.nbytes.append(nbytes)

    def at(self, time: float) -> int:
        """How many bytes there are at a time."""
        index = bisect_right(self.times, time) - 1
        return self.nbytes[index] if index >= 0 else 0

    @property
    def peak(self) -> int:
        return max(self.nbytes, default=0)


@dataclass
class Track:
    """The spans of one rank, or of all ranks of a class, which do the same: in the order of dispatch,
    step after step. Span i is of `labels[which[i]]`; step s begins at span `begins[s]`.
    `waited` is empty where it is not known."""

    name: str
    ranks: tuple[int, ...]
    labels: tuple[Label, ...]
    which: array[int] = field(default_factory=lambda: array("I"))
    issued: array[float] = field(default_factory=lambda: array("d"))
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    begins: list[int] = field(default_factory=list)
    memory: dict[str, Column] = field(default_factory=dict)
    waited: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Span:
        label = self.labels[self.which[index]]
        waited = self.waited[index] if self.waited else 0.0
        return Span(label, self.issued[index], self.start[index], self.end[index], waited)

    def __iter__(self) -> Iterator[Span]:
        labels, waited = self.labels, self.waited or repeat(0.0, len(self))
        for which, issued, start, end, held in zip(
            self.which, self.issued, self.start, self.end, waited, strict=True
        ):
            yield Span(labels[which], issued, start, end, held)

    def add(self, which: int, issued: float, start: float, end: float) -> None:
        self.which.append(which)
        self.issued.append(issued)
        self.start.append(start)
        self.end.append(end)

    def step(self, number: int) -> range:
        """The spans of a step, by number."""
        last = self.begins[number + 1] if number + 1 < len(self.begins) else len(self)
        return range(self.begins[number], last)

    @property
    def streams(self) -> list[str]:
        """Those that it has spans on, in the order in which they begin."""
        used = dict.fromkeys(self.which)
        return list(dict.fromkeys(self.labels[which].stream for which in used))

    @property
    def first(self) -> float:
        return min(self.start, default=0.0)

    @property
    def last(self) -> float:
        return max(self.end, default=0.0)


@dataclass
class Timeline:
    """All tracks of some steps. `directives` are the lines of the strategy that origins count;
    `plan` is the hash of what ran, `plan_json` all of it, and empty for a table, as is `unit`.
    `clock_error` bounds how far the clocks of two ranks are apart. Where the `host_computes`, it runs
    every task itself, and only communication goes on beside."""

    source: Source
    tracks: list[Track]
    steps: list[tuple[float, float]]
    directives: tuple[str, ...] = ()
    plan: str = ""
    clock_error: float = 0.0
    unit: str = "s"
    host_computes: bool = False
    plan_json: bytes = b""

    def __post_init__(self) -> None:
        check_timeline(self)

    def __repr__(self) -> str:
        """How much there is of it; `save` and `piper explain` show what."""
        steps = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        if self.steps:
            steps += f", the last of {self.step_seconds[-1]:.4g} {self.unit}"
        of = f" of plan {self.plan}" if self.plan else ""
        tracks = f"{len(self.tracks)} track{'' if len(self.tracks) == 1 else 's'}"
        return f"<Timeline{of}, {self.source}: {steps}, {tracks}, {self.num_spans:,} spans>"

    def _repr_html_(self) -> str:
        """For notebooks: a picture of its last step."""
        from piper.observe.pictures.svg import draw_svg

        begin, end = self.steps[-1] if self.steps else (None, None)
        return draw_svg(self, begin=begin, end=end, width=_NOTEBOOK)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of the form that its ending says: .timeline or .json for `piper explain`, .svg a
        picture, .pftrace for ui.perfetto.dev, .chrome.json for chrome://tracing."""
        from piper.observe.timeline_output import check_output, save_timeline

        check_output(path)
        save_timeline(self, path)

    @property
    def num_spans(self) -> int:
        return sum(len(track) for track in self.tracks)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        first = min((track.first for track in self.tracks if len(track)), default=0.0)
        return max((track.last for track in self.tracks), default=0.0) - first

    @property
    def step_seconds(self) -> list[float]:
        return [end - begin for begin, end in self.steps]

    @property
    def settled(self) -> range:
        """The steps that are like those to come: not the first of simulated ones, which has no step
        before it."""
        first = len(self.steps) - 1 if self.source == "simulated" else 0
        return range(max(first, 0), len(self.steps))

    def origin(self, label: Label) -> str:
        """The directive that made what a label is of, without long tables in its arguments."""
        if 0 <= label.origin < len(self.directives):
            return _TABLE.sub("{...}", self.directives[label.origin])
        return "the traced program"

    def track_of(self, rank: int) -> Track:
        for track in self.tracks:
            if rank in track.ranks:
                return track
        ranks = [rank for track in self.tracks for rank in track.ranks]
        legal = f"{min(ranks)} to {max(ranks)}" if ranks else None
        raise FileError(f"the timeline has no rank {rank}", legal=legal)
