"""What check, explain and diff have in common: the path of a saved plan in, the Plan out."""

from __future__ import annotations

from piper.errors import Call, PlanError
from piper.files import PLAN_LIMIT, read_bytes
from piper.plan.types import Plan, plan_from_json


def read_plan(path: str) -> Plan:
    data = read_bytes(path, limit=PLAN_LIMIT, legal="what `piper plan FILE.py -o` wrote")
    try:
        return plan_from_json(data)
    except PlanError as error:
        raise PlanError(error.message, call=Call(path), legal=error.legal) from None
