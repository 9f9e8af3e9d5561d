"""Releases: when the host may forget a slot, so that no stream still reads memory that is reused."""

from __future__ import annotations

from dataclasses import dataclass

from piper.plan.types import RankPlan


@dataclass(frozen=True)
class Releases:
    """Slots to forget after each task has been dispatched, and at the end of the step."""

    after: list[tuple[int, ...]]
    at_end: tuple[int, ...]


def release_plan(me: RankPlan, *, home: int) -> Releases:
    """A slot's memory belongs to the stream that allocated it: given back in its order."""
    made: dict[int, int] = {}
    for task in me.tasks:
        for slot in task.writes:
            made.setdefault(slot, task.stream)
    after: list[tuple[int, ...]] = []
    at_end: list[int] = []
    for task in me.tasks:
        now = [s for s in task.frees if made.get(s, home) == task.stream or task.kind == "send"]
        after.append(tuple(now))
        at_end += [s for s in task.frees if s not in now]
    return Releases(after, tuple(at_end))
