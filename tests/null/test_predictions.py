"""Predicted against measured, kind by kind: what is planted is the reason that is given."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from piper.cost.machine import Link
from piper.insight.causes import Causes
from piper.insight.predictions import IDLE, KindTime, _clipped, by_kind
from piper.insight.use_of_time import union
from piper.observe.timeline import Timeline
from piper.sim.disturbances import SlowBody, SlowLink, SlowRank
from piper.sim.simulate import simulate
from tests.null.test_insight import _machine
from tests.null.test_simulate import layers_plan


def _held(plan: Any, measured: Timeline, predicted: Timeline) -> dict[str, KindTime]:
    found = by_kind(Causes(plan, measured), Causes(plan, predicted))
    assert [abs(each.apart) for each in found] == sorted(
        (abs(each.apart) for each in found), reverse=True
    )
    return {each.kind: each for each in found}


@pytest.mark.parametrize("host_computes", [False, True])
def test_a_step_that_is_as_predicted_has_no_reasons(host_computes: bool) -> None:
    plan = layers_plan(4, 8, pp=2, dp=2, schedule="1f1b")
    known = _machine(host_computes=host_computes)
    kinds = _held(plan, simulate(plan, known, by_rank=True), simulate(plan, known))
    for each in kinds.values():
        assert each.measured == pytest.approx(each.predicted, rel=1e-6, abs=1e-12)
        assert each.kind == IDLE or not each.reason, each
    counts = Counter(
        getattr(task, "phase", "") or task.kind
        for part in plan.classes
        for task in part.tasks
        for _ in plan.mesh.ranks(part.slice)
    )
    assert {kind: each.tasks for kind, each in kinds.items() if kind != IDLE} == counts


def test_a_slow_rank_is_the_reason() -> None:
    plan = layers_plan(4, 8, pp=2, dp=2, schedule="1f1b")
    known = _machine(host_computes=True)
    slow = simulate(plan, known, disturbances=[SlowRank(1, 1.5)])
    kinds = _held(plan, slow, simulate(plan, known))
    assert kinds["F"].reason.startswith("rank 1 takes 1.50 x, the others 1.00 x")
    skewed = [each.reason for each in kinds.values() if "skew" in each.reason]
    assert skewed and all("rank 1" in reason for reason in skewed)
    assert "rank 1" in kinds[IDLE].reason and kinds[IDLE].apart > 0


def test_a_slow_link_is_no_skew() -> None:
    plan = layers_plan(2, 4, pp=2, schedule="1f1b")
    known = _machine(host_computes=True, node=Link(2e-6, 1e11))
    slow = simulate(plan, known, disturbances=[SlowLink((0, 1), 5.0)])
    kinds = _held(plan, slow, simulate(plan, known))
    # More messages are under way at a time, and share the link.
    assert kinds["send"].measured == pytest.approx(5 * kinds["send"].predicted, rel=0.2)
    assert "skew" not in kinds["send"].reason
    assert kinds["F"].measured == pytest.approx(kinds["F"].predicted)


def test_computation_beside_communication_is_contention() -> None:
    """The same step on a device that communication takes half of, held to one where it takes none."""
    plan = layers_plan(4, 8, pp=2, dp=2, schedule="1f1b")
    free, shared = (_machine(node=Link(2e-6, 1e8, share)) for share in (0.0, 0.6))
    kinds = _held(plan, simulate(plan, shared, by_rank=True), simulate(plan, free))
    assert kinds["B"].reason.startswith("contention: "), kinds["B"]
    assert "beside communication" in kinds["B"].reason


def test_spans_are_clipped_to_what_lies_beside() -> None:
    chance = random.Random(0)
    for _ in range(100):
        spans = union((a, a + chance.random()) for a in (9 * chance.random() for _ in range(9)))
        begin, end = sorted(chance.choices([*(t for s in spans for t in s), 0.0, 4.0, 10.0], k=2))
        plainly = [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]
        assert _clipped(spans, begin, end) == plainly


def test_a_host_that_is_late_is_the_reason() -> None:
    plan = layers_plan(4, 8, pp=2, schedule="1f1b")
    fast, slow = _machine(dispatch=1e-6), _machine(dispatch=1e-3)
    kinds = _held(plan, simulate(plan, slow, by_rank=True), simulate(plan, fast))
    assert kinds[IDLE].reason.startswith("launch-bound: waiting for the host of ")


def test_bodies_of_many_small_kernels_are_launch_bound() -> None:
    """They end when the host has started the last one."""
    plan = layers_plan(4, 8, pp=2, schedule="1f1b")
    known = _machine()
    measured = simulate(plan, known, by_rank=True, disturbances=[SlowBody("F[", 1.5)])
    for track in measured.tracks:
        for index, span in enumerate(track):
            if span.label.phase == "F":
                track.issued[index] = span.end
    kinds = _held(plan, measured, simulate(plan, known))
    assert kinds["F"].reason.startswith("launch-bound: 100%")
