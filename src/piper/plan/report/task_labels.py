"""Task labels: a plan and one of its classes in; what spans of each task are of, out."""

from __future__ import annotations

import msgspec

from piper.observe.timeline import Label
from piper.plan.report.volume import message_bytes
from piper.plan.tasks import Comm, Run, Task
from piper.plan.types import Plan, RankClass


class ClassLabels:
    """One per task of a class. On the track of one rank a meeting also says who meets, by the first of
    them: several groups of a class meet in one task. All else is shared by all tracks."""

    def __init__(self, plan: Plan, found: RankClass) -> None:
        self.plan = plan
        self.of_class = tuple(_label(plan, found, task) for task in found.tasks)
        self._meetings = [
            (index, task.group) for index, task in enumerate(found.tasks) if isinstance(task, Comm)
        ]
        self._groups = sorted({group for _, group in self._meetings})
        self._of_groups: dict[tuple[int, int], Label] = {}  # by task and first rank

    def of_rank(self, rank: int) -> tuple[Label, ...]:
        plan, made = self.plan, self._of_groups
        first = {group: plan.groups[group].ranks(plan.mesh, rank)[0] for group in self._groups}
        labels = list(self.of_class)
        for index, group in self._meetings:
            key = index, first[group]
            label = made.get(key)
            if label is None:
                named = f"{labels[index].meeting}@{first[group]}"
                label = made[key] = msgspec.structs.replace(labels[index], meeting=named)
            labels[index] = label
        return tuple(labels)


def _label(plan: Plan, found: RankClass, task: Task) -> Label:
    stream = plan.streams[task.stream].name
    if not isinstance(task, Comm):
        phase = task.phase if isinstance(task, Run) else ""
        return Label(task.name, task.kind, stream, phase, task.tags, task.origin)
    return Label(
        task.name,
        task.kind,
        stream,
        tags=task.tags,
        origin=task.origin,
        nbytes=message_bytes(found, task),
        meeting=task.meeting,
        receives=task.facts.receives,
    )
