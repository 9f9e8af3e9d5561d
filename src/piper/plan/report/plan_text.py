"""The text form of a plan: per class of ranks its tasks in dispatch order, one line each."""

from __future__ import annotations

from piper.plan.tasks import Meeting, Task
from piper.plan.types import Plan, RankClass


def plan_to_text(plan: Plan) -> str:
    lines = [f"plan {plan.content_hash()} on {plan.mesh}"]
    for found in plan.classes:
        lines.append(f"class {found.slice}: {len(found.slots)} slots, {len(found.tasks)} tasks")
        lines += [_task_line(plan, found, i, task) for i, task in enumerate(found.tasks)]
    return "\n".join(lines) + "\n"


def _task_line(plan: Plan, found: RankClass, index: int, task: Task) -> str:
    def names(slots: tuple[int, ...]) -> str:
        return " ".join(found.slots[slot].name for slot in slots)

    line = f"  {index:>4} {plan.streams[task.stream].name:<10} {task.kind:<10} {task.name}"
    line += f"  ({names(task.reads)}) -> ({names(task.writes)})"
    if task.waits:
        line += f"  waits {' '.join(map(str, task.waits))}"
    if task.frees:
        line += f"  frees {names(task.frees)}"
    if isinstance(task, Meeting):
        line += f"  group {plan.groups[task.group]}"
    if 0 <= task.origin < len(plan.history):
        line += f"  from {plan.history[task.origin].call}"
    return line
