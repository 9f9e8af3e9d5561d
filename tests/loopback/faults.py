"""Plans with a fault put into them, and whether the adversary notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from piper.api.job import Job
from piper.api.run import Run
from piper.errors import RunError
from piper.plan.tasks import Task
from piper.plan.types import Plan, RankClass
from piper.training.verify import Trained, compare
from tests.loopback.pools import loopback


def changed(plan: Plan, change: Callable[[RankClass, int, Task], Task]) -> Plan:
    """A plan with other tasks where `change(class, index, task)` says so; it must say so somewhere."""
    classes = tuple(
        msgspec.structs.replace(
            part, tasks=tuple(change(part, i, task) for i, task in enumerate(part.tasks))
        )
        for part in plan.classes
    )
    found = msgspec.structs.replace(plan, classes=classes)
    assert found != plan, "the fault was not put in"
    return found


def without_waits(plan: Plan, waiting: str, awaited: str) -> Plan:
    """No task of one kind (or phase) waits for tasks of another kind any more."""

    def change(part: RankClass, index: int, task: Task) -> Task:
        if waiting not in (task.kind, getattr(task, "phase", "")):
            return task
        left = tuple(w for w in task.waits if part.tasks[w].kind != awaited)
        return msgspec.structs.replace(task, waits=left)

    return changed(plan, change)


def noticed(
    job: Job,
    plan: Plan,
    batches: Sequence[Any],
    reference: Trained,
    seeds: Iterable[int] = range(8),
) -> str:
    """How the adversary sees that a plan is wrong: an error, or numbers; '' if it does not."""
    for seed in seeds:
        run = Run(plan, loopback(plan, job.bodies, adversary=True, seed=seed))
        try:
            errors = compare(run, batches, reference)
        except (RunError, RuntimeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        if not errors.exact:
            return "wrong numbers"
    return ""
