"""Calibration: what was measured of a machine, and the Machine that the simulator goes by."""

from __future__ import annotations

import msgspec
import pytest

import piper
from piper.check.parties import compressed
from piper.cost.estimate import added_bytes
from piper.cost.exchange_times import ExchangeTime, LinkTimes, curves
from piper.cost.machine import Curve, Link
from piper.cost.presets import machine
from piper.ir.tensor_type import TensorType
from piper.plan.tasks import Add, Run
from piper.sim.calibration import with_links, with_rehearsals
from piper.sim.simulate import simulate
from piper.sim.task_costs import touched_bytes
from tests.null.test_insight import _machine
from tests.null.test_simulate import layers_plan


def test_a_calibration_gives_what_was_measured() -> None:
    """A machine whose tasks took so long without communication predicts them so."""
    plan = layers_plan(4, 8, pp=2, dp=2, schedule="zbv")
    truth = _machine(host_computes=True, between=1e-3, exchange=0.0, node=Link(0.0, 1e15))
    rehearsal = simulate(plan, truth, steps=3, by_rank=True)
    known = with_rehearsals(machine("cpu"), (plan, rehearsal))
    assert known.between == pytest.approx(1e-3)
    known = msgspec.structs.replace(known, exchange=0.0, node=truth.node, launch=1.0)
    again = simulate(plan, known, steps=2)
    assert again.step_seconds[1] == pytest.approx(rehearsal.step_seconds[1], rel=0.01)


def test_what_several_plans_have_has_one_time() -> None:
    """Bodies that two plans share take the mean of both rehearsals, whichever came first."""
    plans = [layers_plan(4, 8, pp=2, schedule=name) for name in ("1f1b", "gpipe")]
    bodies = [
        {task.body for part in plan.classes for task in part.tasks if isinstance(task, Run)}
        for plan in plans
    ]
    shared = bodies[0] & bodies[1]
    assert shared
    slow = _machine(host_computes=True, node=Link(0.0, 1e15))
    rehearsals = [
        (plan, simulate(plan, msgspec.structs.replace(slow, bodies=dict.fromkeys(found, seconds))))
        for plan, found, seconds in zip(plans, bodies, (1e-3, 3e-3), strict=True)
    ]
    known = with_rehearsals(machine("cpu"), *rehearsals)
    assert known == with_rehearsals(machine("cpu"), *reversed(rehearsals))
    for body in shared:
        assert 1e-3 < known.bodies[body] < 3e-3
    assert known.source == f"calibrated; what was not measured: {machine('cpu').source}"
    assert with_rehearsals(known, *rehearsals).source == known.source


def test_a_curve_goes_through_what_was_measured() -> None:
    curve = Curve([(10.0, 1.0), (20.0, 2.0), (40.0, 2.0), (80.0, 6.0)])
    assert [curve(n) for n in (0, 10, 15, 30, 60, 80, 120)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert Curve([(4.0, 2.0), (8.0, 2.0)])(16.0) == 4.0  # not flat for ever
    assert Curve([(4.0, 2.0), (8.0, 2.0)])(16.0) == 4.0  # not flat for ever
    with pytest.raises(
        piper.PiperError, match=r"(?s)points of all_reduce/2.*legal: pairs of bytes"
    ):
        msgspec.structs.replace(
            machine("cpu"), exchanges={"all_reduce/2": Curve([(2.0, 1.0), (1.0, 2.0)])}
        )


def test_measured_times_that_fall_with_bytes_are_levelled() -> None:
    found = [ExchangeTime("send", 2, False, size, t) for size, t in ((1, 3.0), (2, 1.0), (4, 5.0))]
    assert curves(found, {"send": 0.25}) == {"send/2": Curve([(1, 2.0), (2, 2.0), (4, 5.0)], 0.25)}


def test_additions_touch_where_their_terms_lie() -> None:
    whole, part = TensorType((100,), "float32"), TensorType((10,), "bfloat16")
    assert added_bytes([part], [whole]) == 10 * (2 + 4)
    assert added_bytes([part, part], [whole]) == 20 * (2 + 4)
    assert added_bytes([], [whole]) == 400
    plan = layers_plan(4, 4, dp=2, zero=2)
    for party in compressed(plan).parties:
        for task in party.tasks:
            if isinstance(task, Add) and task.zeros and task.terms:
                terms, sums = ([party.slots[s].type for s in e] for e in (task.terms, task.sums))
                between = sums[0].nbytes - sum(term.nbytes for term in terms)
                assert all(task.first) and between >= 0
                assert touched_bytes(party, task) == added_bytes(terms, sums) + between
                alone = msgspec.structs.replace(
                    task, terms=task.terms[:1], first=(True,), offsets=(0,)
                )
                left = sums[0].nbytes - terms[0].nbytes
                assert touched_bytes(party, alone) == added_bytes(terms[:1], sums) + left > left
                return
    raise AssertionError("no sum starts as zeros")


def test_links_become_curves_by_kind() -> None:
    def all_reduce(carried: float) -> ExchangeTime:
        return ExchangeTime("all_reduce", 2, False, carried, 1e-4 + 2e-9 * carried)

    sends = [ExchangeTime("send", 2, False, n, 5e-5 + 1e-9 * n) for n in (1e3, 1e6)]
    times = LinkTimes(
        (all_reduce(1e3), all_reduce(1e6), *sends), {"all_reduce": 0.7, "send": 0.3}, 3e-5
    )
    known = with_links(machine("cpu"), times)
    curve = known.exchanges["all_reduce/2"]
    assert curve.fixed == pytest.approx(1e-4 + 2e-9 * 1e3)  # of the smallest
    assert curve(5e4) == pytest.approx(1e-4 + 2e-9 * 5e4)
    assert curve.share == 0.7
    assert (known.node.latency, known.node.share, known.exchange) == (
        pytest.approx(5e-5),
        0.3,
        3e-5,
    )
