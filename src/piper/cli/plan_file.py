"""What check, explain and diff have in common: the path of a saved plan in, the Plan out."""

from __future__ import annotations

from piper.check import check_names
from piper.errors import Call, PlanError
from piper.files import PLAN_LIMIT, read_bytes
from piper.plan.types import Plan, plan_from_json


def read_plan(path: str) -> Plan:
    data = read_bytes(path, limit=PLAN_LIMIT, legal="what `piper plan FILE.py -o` wrote")
    try:
        plan = plan_from_json(data)
        check_names(plan)
    except PlanError as error:
        raise type(error)(
            error.message, call=Call(path), details=error.details, legal=error.legal
        ) from None
    return plan
