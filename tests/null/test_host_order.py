"""On the host messages start early, but never before what the plan has them wait for."""

from __future__ import annotations

from itertools import combinations

import pytest

from piper.plan.local_order import Local
from piper.plan.types import RankPlan, bind
from piper.runtime.order.host_order import _finished_before, _messages_early
from tests.matrix import Cell

CELLS = [
    Cell(0, "1f1b", "copied", "skips", pp=4),
    Cell(1, "interleaved_1f1b", "sharded", "moe"),
    Cell(2, "dualpipev", "sharded", "moe", dp=2),
    Cell(3, "zb_h1", "sharded", "branches", dp=2),
    Cell(0, "zbv", "copied", "tied"),
]


def _order(me: RankPlan) -> list[int]:
    return _messages_early(me.tasks, _finished_before(me.tasks, me.slots))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_the_plan_orders_stays_in_order(cell: Cell) -> None:
    plan = cell.job().plan
    moved = 0
    for part in plan.classes:
        me = bind(plan, next(iter(plan.mesh.ranks(part.slice))))
        local = Local(me.tasks, me.slots)
        order = _order(me)
        assert sorted(order) == list(range(len(me.tasks)))
        for first, second in combinations(order, 2):
            if first > second:
                assert me.tasks[first].kind in ("send", "recv")
                assert not local.ordered(second, first), (me.tasks[first], me.tasks[second])
                moved += 1
    assert moved


def test_a_send_comes_right_behind_its_chunk() -> None:
    plan = Cell(0, "1f1b", "copied", "dense").job().plan
    me = bind(plan, 0)
    names = [me.tasks[i].name for i in _order(me)]
    sends = [i for i, name in enumerate(names) if name.startswith("send>")]
    assert sends and all(names[i - 1].startswith("F[") for i in sends)
