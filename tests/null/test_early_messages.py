"""On a CPU the plan dispatches messages early, but never before what it has them wait for."""

from __future__ import annotations

from itertools import combinations

import pytest

from piper.ir.tensor_type import TensorType
from piper.mesh import Slice
from piper.passes import lower
from piper.passes.dispatch.early_messages import early_messages
from piper.plan.local_order import Local
from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Run
from piper.plan.types import Plan, RankClass
from tests.matrix import Cell

CELLS = [
    Cell(0, "1f1b", "copied", "skips", pp=4),
    Cell(1, "interleaved_1f1b", "sharded", "moe"),
    Cell(2, "dualpipev", "sharded", "moe", dp=2),
    Cell(3, "zb_h1", "sharded", "branches", dp=2),
    Cell(0, "zbv", "copied", "tied"),
]


def _emitted(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RankClass], Plan]:
    """A cell's classes of ranks before the pass, and its plan."""
    emitted: list[RankClass] = []

    def noting(rank_class: RankClass) -> RankClass:
        emitted.append(rank_class)
        return early_messages(rank_class)

    monkeypatch.setattr(lower, "early_messages", noting)
    return emitted, cell.job().plan


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_was_ordered_stays_in_order(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted, plan = _emitted(cell, monkeypatch)
    assert len(emitted) == len(plan.classes)
    moved = 0
    for before, after in zip(emitted, plan.classes, strict=True):
        local = Local(before.tasks, before.slots)
        number = {task.name: index for index, task in enumerate(before.tasks)}
        order = [number[task.name] for task in after.tasks]
        assert sorted(order) == list(range(len(before.tasks)))
        for first, second in combinations(order, 2):
            if first > second:
                assert before.tasks[first].kind in ("send", "recv")
                assert not local.ordered(second, first), (before.tasks[first], before.tasks[second])
                moved += 1
        for task in after.tasks:
            waits = {after.tasks[wait].name for wait in task.waits}
            assert waits == {before.tasks[w].name for w in before.tasks[number[task.name]].waits}
        for old, new in zip(before.overlaps, after.overlaps, strict=True):
            assert {before.tasks[i].name for i in old if before.tasks[i].kind == "run"} == {
                after.tasks[i].name for i in new if after.tasks[i].kind == "run"
            }
    assert moved


def test_a_send_comes_right_behind_its_chunk() -> None:
    plan = Cell(0, "1f1b", "copied", "dense").job().plan
    names = [task.name for task in plan.classes[0].tasks]
    sends = [i for i, name in enumerate(names) if name.startswith("send>")]
    assert sends and all(names[i - 1].startswith("F[") for i in sends)


def test_what_a_message_frees_was_read_by_all_others() -> None:
    """One value for two peers: the send that frees it could start first, and may not."""

    def send(name: str, source: int, stream: int, **more: tuple[int, ...]) -> Comm:
        return Comm(name=name, comm="send", key=name, group=0, source=source, stream=stream, **more)

    tasks = (
        Run(name="F0", body="", outputs=(0,), stream=0),
        Run(name="F1", body="", outputs=(1,), stream=0),
        send("other", 1, 2, waits=(1,), frees=(1,)),
        send("same to two", 0, 2),
        send("same to one", 0, 1, waits=(0,), frees=(0,)),
    )
    slots = tuple(Slot(name=name, kind="temp", type=TensorType((2,), "float64")) for name in "ab")
    found = early_messages(RankClass(Slice(), slots, tasks, {}, ()))
    names = [task.name for task in found.tasks]
    assert sorted(names) == sorted(task.name for task in tasks)
    assert names.index("same to two") < names.index("same to one")
