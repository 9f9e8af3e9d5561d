"""Tasks by name: a plan and a task's name, or its start or end, in; where that task stands out."""

from __future__ import annotations

from piper.errors import PlanError, did_you_mean
from piper.ir.nodes import label
from piper.plan.tasks import Run
from piper.plan.types import Plan, RankClass

_SHOWN = 5


def find_tasks(plan: Plan, name: str) -> list[tuple[RankClass, int]]:
    """Each class with the task's index in it; raises if no task or several are meant."""
    tasks = [task for found in plan.classes for task in found.tasks]
    # A region that was cut into several chunks: F[PP=1,MB=0] -> F[PP=1.0,MB=0], F[PP=1.1,MB=0]
    chunks = (task for task in tasks if isinstance(task, Run))
    region = [task.name for task in chunks if label(task.phase, task.tags) == name]
    meant = _meant(list(dict.fromkeys(task.name for task in tasks)), name, region)
    return [
        (found, index)
        for found in plan.classes
        for index, task in enumerate(found.tasks)
        if task.name == meant
    ]


def _meant(names: list[str], name: str, region: list[str]) -> str:
    if name in names:
        return name
    matches = [known for known in names if name and known.startswith(name)]
    matches = matches or [known for known in names if name and known.endswith(name)]
    matches = matches or list(dict.fromkeys(region))
    if len(matches) == 1:
        return matches[0]
    if matches:
        more = [f"and {len(matches) - _SHOWN} more"] if len(matches) > _SHOWN else []
        raise PlanError(
            f"{len(matches)} tasks are called {name}...",
            details=[*matches[:_SHOWN], *more],
            legal="a name, start or end that only one task has",
        )
    raise PlanError(
        f"no task is called {name!r}{did_you_mean(name, names)}",
        legal="a name that `piper plan FILE.py --tasks` shows",
    )
