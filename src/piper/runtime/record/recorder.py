"""Recorder: a Worker in, whose tasks note their times from then on; what they have noted, out.

It wraps the Worker's prepared tasks and has its order made anew of them; at the end the Worker has its
own back. A Worker that is not recorded knows nothing of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from piper.runtime.record.clocks import Tie


@dataclass(slots=True)
class Notes:
    """Of one task, in nanoseconds of a clock: a number for each time that it ran."""

    issued: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RankTimes:
    """The times of all tasks of a rank in nanoseconds of the clock of all ranks, in dispatch order and
    step after step; `error` bounds how far that clock is off."""

    steps: int
    issued: array[int]
    start: array[int]
    end: array[int]
    waited: array[int]
    error: int


class Recorder(Protocol):
    def end(self) -> None:
        """Give the Worker its own tasks back."""

    def times(self, tie: Tie) -> RankTimes:
        """All that was noted, by a clock that the host's is tied to."""


def in_steps(notes: Sequence[Notes], tie: Tie) -> RankTimes:
    """Tasks one after another, step after step, of those steps that are whole."""
    steps = min((len(note.end) for note in notes), default=0)

    def column(name: str, offset: int = 0) -> array[int]:
        values: Iterable[Any] = zip(*(getattr(note, name)[:steps] for note in notes), strict=True)
        return array("q", (value + offset for step in values for value in step))

    issued, start, end = (column(name, tie.offset) for name in ("issued", "start", "end"))
    return RankTimes(steps, issued, start, end, column("waited"), tie.error)
