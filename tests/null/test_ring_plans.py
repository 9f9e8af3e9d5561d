"""Attention as a ring: how often keys and values travel, and that they do so beside the turns."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from piper.api.job import Job
from piper.bodies.tensor.part_ops import own_positions
from piper.bodies.tensor.parts import dealt_blocks
from piper.check import check_plan
from piper.check.prove import problems
from piper.cost.machine import Link
from piper.cost.presets import machine
from piper.ir.layouts import Split
from piper.plan.tasks import Comm, Run
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.strategies import parallel
from tests.tensor_zoo import BATCH, LENGTH, WIDTH, program_of
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


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 5, 6, 7, 8])
def test_each_rank_sees_its_share_of_the_causal_work(cp: int) -> None:
    """With an early and a late part of sequences each, all ranks have equal numbers of pairs of a query
    and a key that it may see: in all turns together, and at every turn behind the first."""
    length = 4 * cp
    own = [_positions(length, cp, rank) for rank in range(cp)]
    pairs = [
        [sum(q >= k for q in own[rank] for k in own[(rank - turn) % cp]) for turn in range(cp)]
        for rank in range(cp)
    ]
    causal = length * (length + 1) // 2
    assert sum(map(sum, pairs)) == causal
    assert {sum(of_rank) for of_rank in pairs} == {causal // cp}
    part = length // cp
    assert all(seen == part * part // 2 for of_rank in pairs for seen in of_rank[1:])


def _positions(length: int, cp: int, rank: int) -> list[int]:
    """Where in a sequence what a rank has of it lies: as leaves are dealt."""
    sizes = dealt_blocks(Split(1, 2, mirrored=True), length)
    return own_positions(sizes, cp, torch.tensor([rank])).tolist()


def test_a_turn_computes_only_what_is_seen() -> None:
    """Two products for each pair of a query and a key that it may see: a half of all in the turn. The
    first turn has the projections before it in its piece, the last one those behind it."""
    cp = 4
    plan = _job(cp=cp).plan
    (part,) = plan.classes
    pairs = (LENGTH // cp) ** 2 // 2
    seen = []
    for task in part.tasks:
        if isinstance(task, Run) and task.phase == "F":
            turns = [w.turn for cut in task.sees for _, w in cut if isinstance(w, Split) and w.turn]
            if turns and turns[0] < cp - 1:
                seen.append(plan.body_flops[task.body])
    assert seen == [2 * 2 * BATCH * WIDTH * pairs] * LAYERS * (cp - 2)


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
