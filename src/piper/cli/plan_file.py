"""What explain and diff have in common: the path of a saved plan in, the Plan out."""

from __future__ import annotations

import os

from piper.cli.user_file import FileError
from piper.errors import Call, PlanError
from piper.plan.types import Plan, plan_from_json


def read_plan(path: str) -> Plan:
    if not os.path.isfile(path):
        raise FileError(f"there is no file {path}", legal="what `piper plan FILE.py -o` wrote")
    with open(path, "rb") as file:
        data = file.read()
    try:
        return plan_from_json(data)
    except PlanError as error:
        raise PlanError(error.message, call=Call(path)) from None
