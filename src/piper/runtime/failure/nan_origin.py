"""NaN origin: what ranks saw of a step that was run again in, where its first bad value is from out."""

from __future__ import annotations

from collections.abc import Sequence

from piper.bodies.leaves import users_name
from piper.plan.slots import Slot
from piper.plan.tasks import Task
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.worker.step_guard import Culprit


def origin_text(plan: Plan, culprits: Sequence[Culprit]) -> str:
    """`rank 1: F[PP=1,MB=0], from place (train.py:31), makes a NaN of values that have none`."""
    if not culprits:
        return "the step is finite when it is run again"
    first = min(culprits, key=lambda culprit: _place(plan, culprit))
    me = bind(plan, first.rank)
    task, slot = me.tasks[first.task], me.slots[first.slot]
    what = "a NaN" if first.nan else "an infinity"
    where = f"rank {first.rank}: {_named(plan, task)}"
    if first.given:
        return f"{where} is given {what} in {_given(me, slot)}"
    return f"{where} makes {what} of values that have none: {slot.name.partition('@')[0]}"


def _place(plan: Plan, culprit: Culprit) -> tuple[object, ...]:
    """Who is blamed first: NaN before infinities, which masks are made of; then a batch or a parameter
    that was bad before the step; then forwards, then the earliest task."""
    task = bind(plan, culprit.rank).tasks[culprit.task]
    forward = getattr(task, "phase", "") == "F"
    return not culprit.nan, not culprit.given, not forward, culprit.task, culprit.rank


def _named(plan: Plan, task: Task) -> str:
    origin = f", from {plan.history[task.origin].call}," if task.origin >= 0 else ""
    return f"{task.name}{origin}"


def _given(me: RankPlan, slot: Slot) -> str:
    if slot.kind == "batch":
        name = users_name(slot.source)
        leaf = "the batch" if name == "batch" else f"{name} of the batch"
        return f"{leaf}, in microbatch {slot.microbatch} of data rank {me.data_rank}"
    return f"{slot.kind} {slot.source or slot.name}"
