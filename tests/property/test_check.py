"""The check of a compressed plan equals the check of the expanded one, with and without faults."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.check import Problem, expanded, problems
from tests.cast_faults import CAST_FAULTS
from tests.faults import FAULTS, Fault
from tests.plans import plan_of
from tests.pool_faults import POOL_FAULTS
from tests.update_faults import UPDATE_FAULTS

pytestmark = pytest.mark.xdist_group("mutants")
SIXTEEN_RANKS = ("pp_dp8_ep", "zero2", "zero3_reuse")
ALL = FAULTS | CAST_FAULTS | POOL_FAULTS | UPDATE_FAULTS
KINDS = [kind for kind in ALL if kind not in ("reordered_collective", "over_the_limit")]


@cache
def _faults(name: str, kind: str) -> list[Fault]:
    return list(ALL[kind](plan_of(name)))


def _shown(found: list[Problem]) -> set[tuple[str, frozenset[str]]]:
    return {(problem.proof, frozenset(problem.tasks)) for problem in found}


@pytest.mark.parametrize("name", SIXTEEN_RANKS)
def test_good_plans(name: str) -> None:
    plan = plan_of(name)
    assert plan.mesh.size == 16
    assert problems(plan) == [] == problems(expanded(plan))
    # Above the limit on all ranks of a class, or on none.
    assert _shown(problems(plan, memory_limit=1)) == _shown(
        problems(expanded(plan), memory_limit=1)
    )


@settings(max_examples=60)
@given(st.sampled_from(SIXTEEN_RANKS), st.sampled_from(KINDS), st.data())
def test_a_fault_is_the_same_for_classes_and_for_ranks(
    name: str, kind: str, data: st.DataObject
) -> None:
    places = _faults(name, kind)
    if not places:
        return
    fault = places[data.draw(st.integers(0, len(places) - 1))]
    assert _shown(problems(fault.plan)) == _shown(problems(expanded(fault.plan)))
