"""What check, explain and diff have in common: the path of a saved plan in, the Plan out."""

from __future__ import annotations

from piper.api.job_file import plan_file_from_json
from piper.check import check_names
from piper.errors import Call, PlanError
from piper.files import PLAN_LIMIT, read_bytes
from piper.plan.types import Plan


def read_plan(path: str) -> Plan:
    return read_plans(path)[0]


def read_plans(path: str) -> tuple[Plan, Plan | None]:
    """The plan and, of a job's file, that of its evaluation; all their numbers name something."""
    data = read_bytes(path, limit=PLAN_LIMIT, legal="what `piper plan FILE.py -o` wrote")
    try:
        plan, _, evaluation = plan_file_from_json(data)
        check_names(plan)
        if evaluation is not None:
            check_names(evaluation)
    except PlanError as error:
        raise type(error)(
            error.message, call=Call(path), details=error.details, legal=error.legal
        ) from None
    return plan, evaluation
