"""Task labels: a plan and one of its classes in; what spans of each task are of, out."""

from __future__ import annotations

from piper.observe.timeline import Label
from piper.plan.report.volume import message_bytes
from piper.plan.tasks import Comm, Run, Task
from piper.plan.types import Plan, RankClass


def labels_of(plan: Plan, found: RankClass, *, rank: int | None = None) -> tuple[Label, ...]:
    """One per task of a class. For the track of one `rank` a meeting also says who meets, by the first
    of them: several groups of a class meet in one task."""
    first: dict[int, str] = {}
    if rank is not None:
        used = {task.group for task in found.tasks if isinstance(task, Comm)}
        first = {g: f"@{plan.groups[g].ranks(plan.mesh, rank)[0]}" for g in used}
    return tuple(_label(plan, found, task, first) for task in found.tasks)


def _label(plan: Plan, found: RankClass, task: Task, first: dict[int, str]) -> Label:
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
        meeting=task.meeting + first.get(task.group, ""),
        receives=task.facts.receives,
    )
