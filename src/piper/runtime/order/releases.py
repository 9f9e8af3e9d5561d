"""Releases: one rank's tasks in; when the host may let go of each slot's tensor, task by task, out.

An allocator that serves several streams hands memory out again in the order of the stream on which it
was allocated. So a tensor is let go only when a task of that stream is dispatched which comes, on the
device, after the task that frees the slot.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from piper.plan.local_order import Local
from piper.plan.tasks import sends
from piper.plan.types import RankPlan


@dataclass(frozen=True)
class Releases:
    """`after[i]`: the slots to let go when task i is dispatched; `last`: when a step is complete."""

    after: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


def releases_of(plan: RankPlan, *, home: int) -> Releases:
    """`home` is the stream on which batches and keys are allocated.

    A send keeps what it sends by itself, and a buffer of a pool is never given back: there only the
    reference goes. The first task that writes a slot allocates it.
    """
    local = Local(plan.tasks, plan.slots)
    on_stream: dict[int, list[int]] = {}
    allocated: dict[int, int] = {}  # slot -> stream
    for index, task in enumerate(plan.tasks):
        on_stream.setdefault(task.stream, []).append(index)
        for slot in task.writes:
            allocated.setdefault(local.root[slot], task.stream)
    after: list[list[int]] = [[] for _ in plan.tasks]
    last: list[int] = []
    for index, task in enumerate(plan.tasks):
        for slot in task.frees:
            stream = allocated.get(slot, home)
            at: int | None = index
            known = plan.slots[slot]
            memory = known.pool < 0 and known.kind != "host"
            if memory and not sends(task) and stream != task.stream:
                at = _first_behind(local, index, on_stream.get(stream, []))
            (last if at is None else after[at]).append(slot)
    return Releases(tuple(map(tuple, after)), tuple(last))


def _first_behind(local: Local, index: int, tasks: list[int]) -> int | None:
    """The first of a stream's tasks that starts when task `index` is surely complete.

    What is complete when a stream's task starts is so for the next one: the first is found by halving.
    """
    mine = local.stream[index]
    place = bisect.bisect_left(tasks, index, key=lambda task: local.before[task][mine])
    return tasks[place] if place < len(tasks) else None
