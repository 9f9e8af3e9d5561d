"""Why a step takes as long as it does: the critical path, and what is planted into it."""

from __future__ import annotations

from typing import Any

import pytest

from piper.cost.machine import Link, Machine
from piper.insight.causes import Causes
from piper.insight.critical_path import WAITING, critical_path
from piper.sim.simulate import simulate
from piper.sim.task_costs import GivenCosts
from tests.null.test_simulate import PAPER_MACHINE, layers_plan


def _machine(**changes: Any) -> Machine:
    link = Link(2e-6, 1e11, share=0.1)
    values: dict[str, Any] = {
        "name": "test", "flops": {"float32": 1e12}, "bandwidth": 1e12, "node": link, "network": link,
        "ranks_per_node": 8, "launch": 1e-5, "dispatch": 1e-6, "exchange": 1e-6,
    }  # fmt: skip
    return Machine(**{**values, **changes})


@pytest.mark.parametrize("host_computes", [False, True])
@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 3, "zero": 3}, {"pp": 2, "dp": 2, "zero": 2}]
)
def test_the_parts_of_the_path_sum_up_to_the_step(degrees: dict, host_computes: bool) -> None:
    plan = layers_plan(4, 4, **degrees)
    timeline = simulate(plan, _machine(host_computes=host_computes), steps=2)
    path = critical_path(Causes(plan, timeline))
    begin, end = timeline.steps[1]
    assert path.seconds == pytest.approx(end - begin)
    for one, other in zip(path.segments, path.segments[1:], strict=False):
        assert one.end == pytest.approx(other.begin)
    for sums in (path.by_kind, path.by_directive, path.by_track):
        assert sum(sums.values()) == pytest.approx(path.seconds)


def test_the_path_of_1f1b_is_the_one_on_paper() -> None:
    plan = layers_plan(4, 8, pp=4, schedule="1f1b")
    costs = GivenCosts({"F": 1.0, "B": 2.0}, 0.25)
    path = critical_path(Causes(plan, simulate(plan, PAPER_MACHINE, costs=costs)))
    assert path.by_kind["F"] + path.by_kind["B"] + path.by_kind["recv"] == pytest.approx(
        path.seconds
    )
    assert path.by_kind.get(WAITING, 0.0) == 0.0
