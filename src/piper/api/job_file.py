"""A job's file: plans and the texts of their bodies in, versioned JSON out; and back.

The file is a plan's with a few more fields: `piper check`, `explain` and `diff` read it as a plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from piper.errors import PlanError
from piper.plan.body_spec import content_hash
from piper.plan.types import Plan, plan_from_json
from piper.stored.checked_index import check_index
from piper.stored.stored_pieces import Stored

_LEGAL = "a file that job.save(path) or `piper plan FILE.py -o PLAN.json` wrote"


class JobFile(msgspec.Struct, frozen=True):
    """What is needed to run a plan and its evaluation."""

    plan: Plan
    bodies: dict[str, str]
    evaluation: Plan | None
    weights: Stored | None = None


class _Rest(msgspec.Struct):
    """The fields beside those of the plan."""

    code: dict[str, str] | None = None
    evaluation: msgspec.Raw = msgspec.Raw(b"null")
    weights: Stored | None = None


def job_to_json(
    plan: Plan, bodies: Mapping[str, str], evaluation: Plan | None, weights: Stored | None = None
) -> bytes:
    other = msgspec.Raw(evaluation.to_json() if evaluation else b"null")
    rest = _Rest(dict(bodies), other, weights)
    return plan.to_json()[:-1] + b"," + msgspec.json.encode(rest)[1:]


def job_from_json(data: bytes) -> JobFile:
    plan, rest, evaluation = _parts(data)
    if rest.code is None:
        raise PlanError("this is a plan without its bodies", legal=_LEGAL)
    if rest.weights is not None:
        check_index(rest.weights, plan)
    return JobFile(plan, rest.code, evaluation, rest.weights)


def plan_file_from_json(data: bytes) -> tuple[Plan, dict[str, str] | None, Plan | None]:
    """The plan of a file and, of a job's, the texts of all bodies and the evaluation.

    Bodies are what their names say; what they do is looked at when a job is loaded.
    """
    plan, rest, evaluation = _parts(data)
    return plan, rest.code, evaluation


def _parts(data: bytes) -> tuple[Plan, _Rest, Plan | None]:
    plan = plan_from_json(data)
    try:
        rest = msgspec.json.decode(data, type=_Rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"not a Piper job: {error}", legal=_LEGAL) from None
    without = bytes(rest.evaluation) == b"null"
    evaluation = None if without else plan_from_json(bytes(rest.evaluation))
    if rest.code is not None:
        for each in (plan, evaluation) if evaluation else (plan,):
            _check_code(each, rest.code)
    return plan, rest, evaluation


def _check_code(plan: Plan, code: Mapping[str, str]) -> None:
    for name in plan.bodies:
        if name not in code or content_hash(code[name]) != name:
            what = "is not what its name says" if name in code else "is missing"
            raise PlanError(f"body {name} {what}", legal="the bodies that the plan was saved with")
