"""The release plan: memory goes back when its own stream comes after the last use, and no later."""

from __future__ import annotations

import random

import pytest

from piper.ir.tensor_type import TensorType
from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.order.releases import releases_of
from tests.matrix import CELLS, Cell, covering
from tests.plans import plan_of

HOME = 0
PLANS = ("pp4", "pp_dp_ep", "zero1", "zero2", "zero3_reuse")


def _complete_before(tasks: tuple[Task, ...]) -> list[set[int]]:
    """Per task, all that are complete when it starts, by plain reachability."""
    direct: list[set[int]] = []
    for index, task in enumerate(tasks):
        earlier = range(index)
        same = {i for i in earlier if tasks[i].stream == task.stream}
        reads = {i for i in earlier if tasks[i].kind == "read"}
        direct.append(same | reads | set(task.waits))
    found: list[set[int]] = []
    for start in range(len(tasks)):
        seen: set[int] = set()
        stack = list(direct[start])
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack += direct[at] - seen
        found.append(seen)
    return found


def _allocated_on(plan: RankPlan, slot: int) -> int:
    parts = {slot, *(i for i, s in enumerate(plan.slots) if s.base == slot)}
    return next((t.stream for t in plan.tasks if parts & set(t.writes)), HOME)


def _check(plan: RankPlan) -> tuple[int, int, int]:
    """How many slots are let go where they are freed, later, and at the end of the step."""
    found = releases_of(plan, home=HOME)
    before = _complete_before(plan.tasks)
    released = {slot: index for index, slots in enumerate(found.after) for slot in slots}
    freed = {slot: index for index, task in enumerate(plan.tasks) for slot in task.frees}
    assert len(found.after) == len(plan.tasks)
    assert sorted((*released, *found.last)) == sorted(freed), "each slot once"
    at_once = 0
    for slot, by in freed.items():
        known, task = plan.slots[slot], plan.tasks[by]
        stream = _allocated_on(plan, slot)
        kept = known.pool >= 0 or known.kind == "host" or task.kind == "send"
        if kept or stream == task.stream:
            assert released[slot] == by
            at_once += 1
            continue
        good = [
            i for i, t in enumerate(plan.tasks) if i > by and t.stream == stream and by in before[i]
        ]
        assert released.get(slot) == (good[0] if good else None)
        assert bool(good) or slot in found.last
    return at_once, len(freed) - at_once - len(found.last), len(found.last)


def _ranks(plan: Plan) -> list[RankPlan]:
    """One rank of each class."""
    return [bind(plan, next(iter(plan.mesh.ranks(part.slice)))) for part in plan.classes]


@pytest.mark.xdist_group("mutants")
def test_plans_let_go_as_early_as_is_safe() -> None:
    counts = [_check(rank) for name in PLANS for rank in _ranks(plan_of(name))]
    at_once, later, last = map(sum, zip(*counts, strict=True))
    assert at_once > later > 0 and last > 0, "all three occur"


@pytest.mark.parametrize("cell", covering(CELLS)[::25], ids=lambda cell: cell.name)
def test_cells_of_the_matrix_let_go_as_early_as_is_safe(cell: Cell) -> None:
    for rank in _ranks(cell.job().plan):
        _check(rank)


class _Free(Task, frozen=True, kw_only=True, tag="free"):
    """A task with any number of slots."""

    taken: tuple[int, ...]
    made: tuple[int, ...]
    READS = ("taken",)
    WRITES = ("made",)
    kind = "free"


class _Blocking(_Free, frozen=True, kw_only=True, tag="blocking"):
    blocks = True
    kind = "read"


class _Sending(Comm, frozen=True, kw_only=True, tag="sending"):
    taken: tuple[int, ...]
    made: tuple[int, ...]
    comm: str = "send"
    group: int = 0
    key: str = ""

    @property
    def reads(self) -> tuple[int, ...]:
        return self.taken

    @property
    def writes(self) -> tuple[int, ...]:
        return self.made


def _random_plan(seed: int) -> RankPlan:
    """Tasks on a few streams with any earlier waits; each slot is written, read and then freed."""
    draw = random.Random(seed)
    num_tasks, num_streams = draw.randint(1, 30), draw.randint(1, 4)
    kinds = (_Free, _Free, _Free, _Sending, _Free, _Blocking)
    slots: list[Slot] = []
    reads: list[list[int]] = [[] for _ in range(num_tasks)]
    writes: list[list[int]] = [[] for _ in range(num_tasks)]
    frees: list[list[int]] = [[] for _ in range(num_tasks)]
    for number in range(draw.randint(1, 12)):
        kind = draw.choice(("temp", "temp", "temp", "batch", "host"))
        pool = 0 if kind == "temp" and draw.random() < 0.2 else -1
        users = sorted(draw.sample(range(num_tasks), min(num_tasks, draw.randint(1, 3))))
        slots.append(Slot(f"s{number}", kind, TensorType((2,), "float32"), pool=pool))  # type: ignore[arg-type]
        for place, user in enumerate(users):
            (writes if place == 0 and kind != "batch" else reads)[user].append(number)
        frees[users[-1]].append(number)
    tasks = tuple(
        draw.choice(kinds)(
            name=f"t{i}",
            stream=draw.randrange(num_streams),
            waits=tuple(sorted(draw.sample(range(i), min(i, draw.choice((0, 0, 1, 2)))))),
            taken=tuple(reads[i]),
            made=tuple(writes[i]),
            frees=tuple(frees[i]),
        )
        for i in range(num_tasks)
    )
    return RankPlan(0, 0, {}, tasks, tuple(slots), {}, {})


def test_random_tasks_let_go_as_early_as_is_safe() -> None:
    counts = [_check(_random_plan(seed)) for seed in range(400)]
    assert all(sum(column) > 100 for column in zip(*counts, strict=True))
