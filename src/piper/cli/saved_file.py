"""What explain and diff have in common: the path of a saved plan or timeline in, either of them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piper.errors import Call, FileError, PlanError
from piper.files import PLAN_LIMIT, read_bytes, read_start

if TYPE_CHECKING:
    from piper.observe.timeline import Timeline
    from piper.plan.types import Plan

TIMELINE_LIMIT = 16 * PLAN_LIMIT
_LEGAL = (
    "what `piper plan -o`, `piper simulate -o FILE.timeline` or `piper train --record FILE` wrote"
)


def read_saved(path: str) -> Plan | Timeline:
    from piper.cli.plan_file import read_plan
    from piper.observe.timeline_files import from_bytes, is_timeline

    start, _ = read_start(path, 64)
    if is_timeline(start):
        try:
            return from_bytes(read_bytes(path, limit=TIMELINE_LIMIT))
        except FileError as error:
            raise FileError(error.message, call=Call(path), legal=error.legal or _LEGAL) from None
    if not start.lstrip().startswith(b"{"):
        raise FileError(f"{path} is neither a plan nor a timeline", legal=_LEGAL)
    return read_plan(path)


def plan_of(timeline: Timeline, path: str) -> Plan:
    """The plan that a timeline has with it."""
    from piper.check import check_names
    from piper.plan.types import plan_from_json

    if not timeline.plan_json:
        raise FileError(f"{path} has no plan with it", legal=f"{path} PLAN.json")
    try:
        plan = plan_from_json(timeline.plan_json)
        check_names(plan)
    except PlanError as error:
        raise PlanError(
            error.message, call=Call(path), details=error.details, legal=error.legal
        ) from None
    if plan.content_hash() != timeline.plan:
        raise PlanError(f"{path} has another plan with it than the one that ran", legal=_LEGAL)
    return plan


def check_same(timeline: Timeline, path: str, plan: Plan, name: str) -> Plan:
    """The plan, if the timeline is one of it: a model that is traced again may have bodies that save
    other tensors, but it has the same directives and tasks."""
    from piper.plan.report.diff import diff
    from piper.plan.types import plan_from_json

    found = plan.content_hash()
    if found == timeline.plan:
        return plan
    details = []
    if timeline.plan_json:
        other = plan_from_json(timeline.plan_json)
        if _outline(plan) == _outline(other):
            return plan
        details = diff(other, plan).splitlines()[:6]
    raise PlanError(
        f"{path} is of plan {timeline.plan}, {name} is plan {found}",
        details=details,
        legal="the plan, or the file and the options, of the run",
    )


def _outline(plan: Plan) -> tuple[object, ...]:
    names = [(part.slice, [task.name for task in part.tasks]) for part in plan.classes]
    return plan.mesh, [str(record) for record in plan.history], names
