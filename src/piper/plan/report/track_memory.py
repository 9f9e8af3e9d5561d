"""Track memory: a class of ranks and its spans in; the bytes of each category over time, out."""

from __future__ import annotations

from piper.observe.timeline import Column, Timeline, Track
from piper.plan.local_order import Local
from piper.plan.memory_ledger import CATEGORIES, MemoryLedger
from piper.plan.types import Plan, RankClass, class_of


def fill_memories(plan: Plan, timeline: Timeline) -> None:
    """Give all tracks of a timeline of the plan what it has alive, as `fill_memory` does."""
    for track in timeline.tracks:
        fill_memory(plan, class_of(plan, track.ranks[0]), track)


def fill_memory(plan: Plan, found: RankClass, track: Track) -> None:
    """Give a track, whose labels are those of the class's tasks, what the plan has alive as its spans
    start and end. What depends on the data counts at its bound."""
    local = Local(found.tasks, found.slots)
    columns = {name: Column() for name in CATEGORIES}
    for number in range(len(track.begins)):
        ledger = MemoryLedger(plan, local)
        known: dict[str, int] = {}
        for time, index, begins in moments(track, number):
            (ledger.start if begins else ledger.end)(track.which[index])
            for name, nbytes in ledger.held.items():
                if known.get(name) != nbytes:
                    known[name] = nbytes
                    columns[name].set(time, nbytes)
    track.memory = {name: column for name, column in columns.items() if column.peak}


def moments(track: Track, step: int) -> list[tuple[float, int, bool]]:
    """Every start and end of a step's spans in time: when, which span, and whether it begins. At one
    time earlier tasks end before later ones start."""
    spans = track.step(step)
    starts = ((track.start[i], i, True) for i in spans)
    ends = ((track.end[i], i, False) for i in spans)
    return sorted([*starts, *ends], key=lambda m: (m[0], m[1], not m[2]))
