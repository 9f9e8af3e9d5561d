"""One rank's tasks in; how many microbatches are in the middle of their bodies at once, out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.plan.tasks import Run, Task, microbatch_of


def most_under_way(tasks: Sequence[Task], split_tags: Sequence[str]) -> tuple[int, int]:
    """How many at most, and the task with which that begins."""
    runs = [(at, microbatch_of(t, split_tags)) for at, t in enumerate(tasks) if isinstance(t, Run)]
    last = {microbatch: at for at, microbatch in runs}
    begun: set[tuple[int, ...]] = set()
    most, where = 0, -1
    for at, microbatch in runs:
        begun.add(microbatch)
        begun = {each for each in begun if last[each] >= at}
        if len(begun) > most:
            most, where = len(begun), at
    return most, where
