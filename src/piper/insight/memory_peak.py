"""Memory peak: a plan and a timeline of it in; when a rank holds most, and what is alive then, out."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import msgspec

from piper.insight.causes import Causes
from piper.observe.timeline import Track
from piper.plan.local_order import Local
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.report.track_memory import moments

SHOWN = 8


class Alive(msgspec.Struct, frozen=True):
    """A tensor that is alive at the peak, and the task and directive that wrote it; it was there before
    the step if there is no task."""

    name: str
    category: str
    nbytes: int
    task: str
    directive: str


class MemoryPeak(msgspec.Struct, frozen=True):
    """The most bytes of a track in a step: at which time, as which task starts; by category, with the
    largest tensors. What depends on the data counts at its bound."""

    track: str
    ranks: tuple[int, ...]
    time: float
    task: str
    nbytes: int
    by_category: dict[str, int]
    largest: tuple[Alive, ...]


def memory_peak(causes: Causes, number: int) -> MemoryPeak:
    """Of track `number`, in the order in which its tasks ran."""
    track, found = causes.timeline.tracks[number], causes.classes[number]
    local = Local(found.tasks, found.slots)
    ledger = MemoryLedger(causes.plan, local)
    most, at = ledger.total, -1
    passing = moments(track, causes.step)
    for place, (_, span, begins) in enumerate(passing):
        (ledger.start if begins else ledger.end)(track.which[span])
        if ledger.total > most:
            most, at = ledger.total, place
    ledger = MemoryLedger(causes.plan, local)  # again, up to the peak, to see what is alive there
    for _, span, begins in passing[: at + 1]:
        (ledger.start if begins else ledger.end)(track.which[span])
    started = {track.which[span] for _, span, begins in passing[: at + 1] if begins}
    time, span, _ = passing[at] if at >= 0 else (causes.begin, -1, True)
    return MemoryPeak(
        track.name,
        track.ranks,
        time,
        track.labels[track.which[span]].name if span >= 0 else "the step's begin",
        most,
        {name: held for name, held in ledger.held.items() if held},
        tuple(
            _alive(causes, track, local, slot, nbytes, started)
            for nbytes, slot in ledger.largest()[:SHOWN]
        ),
    )


def _alive(
    causes: Causes, track: Track, local: Local, slot: int, nbytes: int, started: set[int]
) -> Alive:
    writers = [index for index in local.writers.get(slot, []) if index in started]
    label = track.labels[writers[-1]] if writers else None
    return Alive(
        local.slots[slot].name,
        local.use[slot],
        nbytes,
        label.name if label else "",
        causes.timeline.origin(label) if label else "",
    )


def largest_total(track: Track) -> int:
    """The most bytes at once in all categories that a timeline has of a track."""
    changes: dict[float, int] = defaultdict(int)
    for column in track.memory.values():
        before = 0
        for time, nbytes in zip(column.times, column.nbytes, strict=True):
            changes[time] += nbytes - before
            before = nbytes
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)
