"""Memory of rows that travel to experts: planned for `max_load` times an even share, whatever comes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from piper.api.job import Job
from piper.check import check_plan
from piper.errors import CheckError, ShardError, StrategyError
from piper.plan.types import Plan
from piper.strategies import parallel, to_json
from piper.training.verify import compare
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("max_load")


def _job(**options: Any) -> Job:
    strategy = parallel(dp=4, ep=4, microbatches=2, **options)
    return program_of("tied").apply(strategy).lower(optimizer=ADAMW)


def _peak(job: Job) -> int:
    return max(peak.total for peak in job.report.peaks)


def _routed_bytes(plan: Plan, load: float) -> int:
    slots = (slot for slot in plan.classes[0].slots if slot.bound is not None)
    return sum(slot.type.planned_nbytes(load) for slot in slots)


def test_memory_is_planned_for_the_load_and_never_for_more_than_can_come() -> None:
    even, default, most, beyond = (_job(max_load=load) for load in (1.0, 2.0, 4.0, 9.0))
    assert _peak(even) < _peak(default) < _peak(most) == _peak(beyond)
    plan = even.plan
    assert 4 * _routed_bytes(plan, 1) == 2 * _routed_bytes(plan, 2) == _routed_bytes(plan, 4)
    assert _routed_bytes(plan, 9) == _routed_bytes(plan, 4)
    assert _peak(_job()) == _peak(default)
    assert "memory is planned for 2 times an even share of rows" in default.summary()
    assert "an even share" not in program_of("tied").apply(parallel(dp=2)).lower().summary()


def _inside(plan: Plan) -> int:
    return sum(moment.own for moments in plan.inside.values() for moment in moments)


def test_bodies_grow_with_the_load_too() -> None:
    inside = [_inside(_job(max_load=load).plan) for load in (1.0, 2.0, 4.0)]
    assert inside[0] < inside[1] < inside[2]


def test_more_rows_than_planned_are_no_error() -> None:
    """The routing of these batches is not even, and nothing may exceed an even share here."""
    job = _job(max_load=1.0)
    with job.launch("loopback") as run:
        errors = compare(run, batches_of("tied"), reference_of("tied", job))
    assert errors.exact, errors


@pytest.mark.parametrize("load", [0.99, 0, -1, "2", True, None, float("nan"), float("inf")])
def test_impossible_loads_are_refused(load: Any) -> None:
    with pytest.raises(ShardError, match="max_load="):
        _job(max_load=load)


def test_a_plan_with_an_impossible_load_is_refused() -> None:
    plan = _job().plan
    origin = next(i for i, r in enumerate(plan.history) if hasattr(r.directive, "max_load"))
    for load in (0.5, float("inf")):
        history = list(plan.history)
        directive: Any = history[origin].directive
        directive = msgspec.structs.replace(directive, max_load=load)
        history[origin] = msgspec.structs.replace(history[origin], directive=directive)
        with pytest.raises(CheckError, match="an even share"):
            check_plan(msgspec.structs.replace(plan, history=tuple(history)))


def test_the_published_form_has_no_load() -> None:
    program = program_of("tied").apply(parallel(dp=4, ep=4, microbatches=2, max_load=3.0))
    with pytest.raises(StrategyError, match="max_load"):
        to_json(program)
