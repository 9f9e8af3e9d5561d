"""Attention as a ring: how often keys and values travel, and that they do so beside the turns."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest

from piper.api.job import Job
from piper.check import check_plan
from piper.check.prove import problems
from piper.cost.machine import Link
from piper.cost.presets import machine
from piper.ir.layouts import Split
from piper.plan.tasks import Comm, Run
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.strategies import parallel
from tests.tensor_zoo import program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")
LAYERS = 2
# A body takes 4 microseconds here, and a shift a little less.
PROMPT = msgspec.structs.replace(
    machine("h100"), dispatch=0.0, exchange=0.0, node=Link(latency=3.8e-6, bandwidth=1e13)
)


@cache
def _job(**degrees: Any) -> Job:
    strategy = parallel(cp_attention="ring", **degrees)
    return program_of("dense").apply(strategy).lower(optimizer=ADAMW, machine=PROMPT)


def _shifts(plan: Plan) -> list[Comm]:
    (part,) = plan.classes
    return [t for t in part.tasks if isinstance(t, Comm) and t.comm == "shift"]


@pytest.mark.parametrize("cp", [2, 4])
def test_keys_and_values_travel_once_between_two_turns(cp: int) -> None:
    """One shift brings both; their gradients come back the same way."""
    plan = _job(cp=cp).plan
    ways = Counter(task.reverse for task in _shifts(plan))
    assert ways == {False: LAYERS * (cp - 1), True: LAYERS * (cp - 1)}
    (part,) = plan.classes
    others = {t.comm for t in part.tasks if isinstance(t, Comm)} - {"shift"}
    assert others == {"all_reduce"} and not plan.gathered


def test_turns_are_pieces_that_say_whose_keys_they_take() -> None:
    plan = _job(cp=4).plan
    (part,) = plan.classes
    seen = [
        way.turn
        for task in part.tasks
        if isinstance(task, Run) and task.phase == "F"
        for cut in task.sees
        for _, way in cut
        if isinstance(way, Split) and way.turn
    ]
    assert seen == [1, 2, 3] * LAYERS


def test_each_shift_lies_beside_the_turn_before_it() -> None:
    """And each shift of gradients beside the turn that comes next."""
    [track] = simulate(_job(cp=4).plan, PROMPT).tracks
    spans = {span.label.name: span for span in track}
    for turn in (1, 2, 3):
        for shift, beside in (
            (f"shift>%cp0.change.ring_load-turn{turn}[MB=0]", f"F[PP=0.{turn + 1},MB=0]"),
            (f"shift>$d.%cp0.change.ring_load-turn{turn}[MB=0]>pp=0", f"B[PP=0.{turn + 1},MB=0]"),
        ):
            one, other = spans[shift], spans[beside]
            together = min(one.end, other.end) - max(one.start, other.start)
            assert together > 0.8 * (one.end - one.start), shift


def test_a_shift_the_wrong_way_round_is_seen() -> None:
    plan = _job(cp=4).plan
    check_plan(plan)
    (part,) = plan.classes
    index = next(i for i, t in enumerate(part.tasks) if t.kind == "shift")
    turned = msgspec.structs.replace(part.tasks[index], reverse=True)
    tasks = (*part.tasks[:index], turned, *part.tasks[index + 1 :])
    wrong = msgspec.structs.replace(plan, classes=(msgspec.structs.replace(part, tasks=tasks),))
    assert any("the wrong way round" in p.message for p in problems(wrong))
