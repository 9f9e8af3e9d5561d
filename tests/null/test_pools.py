"""Buffers planned at compile time: who has one, how many there are, and what they count as."""

from __future__ import annotations

import itertools

import pytest

from piper.check import check_plan, compressed
from piper.check.proofs.limit import peaks
from piper.ir.tensor_type import TensorType
from piper.passes.dispatch.shared_buffers import share_buffers
from piper.plan.local_order import Local
from piper.plan.memory_use import memory_use
from piper.plan.report.summary import slot_bytes
from piper.plan.slots import Slot
from piper.plan.tasks import Task
from piper.plan.types import Plan
from piper.strategies import parallel
from tests.plans import NAMES, plan_of
from tests.tasks import comm, run
from tests.zoo import ADAMW, program_of

pytestmark = pytest.mark.xdist_group("mutants")
COMPUTE, MESSAGES, OTHER = 0, 1, 2


def _received(num: int, *, apart: int = 1, stream: int = COMPUTE) -> tuple[list[Slot], list[Task]]:
    """Receives, each right before the chunk that reads and frees it, and chunks in between."""
    slots = [Slot(f"x{i}", "temp", TensorType((4,), "float32")) for i in range(num)]
    tasks = []
    for i in range(num):
        tasks.append(comm("recv", f"recv{i}", MESSAGES, target=i))
        tasks.append(run(f"F{i}", stream, reads=(i,), frees=(i,)))
        tasks += [run(f"other{i}.{j}", COMPUTE) for j in range(apart - 1)]
    return slots, tasks


def _shared(slots: list[Slot], tasks: list[Task]) -> tuple[dict[int, int], list[set[int]]]:
    after: list[set[int]] = [set() for _ in tasks]
    frees = {i: list(task.frees) for i, task in enumerate(tasks) if task.frees}
    return share_buffers(slots, tasks, frees, after, keep=()), after


def test_a_receive_waits_for_a_buffer_that_two_chunks_have_passed_since() -> None:
    slots, tasks = _received(6)
    buffers, after = _shared(slots, tasks)
    assert buffers == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    assert [sorted(a) for a in after[::2]] == [[], [], [], [1], [3], [5]]
    slots, tasks = _received(6, apart=3)
    buffers, after = _shared(slots, tasks)
    assert set(buffers.values()) == {0}
    assert [sorted(a) for a in after[::4]] == [[], [1], [5], [9], [13], [17]]


def test_a_buffer_that_is_free_anyway_is_taken_at_once() -> None:
    slots, tasks = _received(3)
    tasks[2] = comm("recv", "recv1", MESSAGES, target=1)
    after: list[set[int]] = [set(), set(), {1}, set(), {1}, set()]
    frees = {1: [0], 3: [1], 5: [2]}
    buffers = share_buffers(slots, tasks, frees, after, keep=())
    assert buffers == {0: 0, 1: 0, 2: 1}, "the third does not come after the second anyway"
    assert after[2] == {1}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"type": TensorType((4,), "float32", 9)}, None),
        ({"kind": "gathered"}, None),
        ({"kind": "grad"}, None),
        ({"type": TensorType((0,), "float32")}, None),
        ({"base": 1}, None),
        ({}, "send"),
        ({}, "all_reduce"),
        ({}, "run"),
    ],
    ids=str,
)
def test_what_has_no_buffer(change: dict, kind: str | None) -> None:
    slots = [Slot(**{"name": "x", "kind": "temp", "type": TensorType((4,), "float32"), **change})]
    reader = run("reader", COMPUTE, reads=(0,), writes=(0,) if kind == "run" else ())
    tasks: list[Task] = [
        comm("recv", "recv", MESSAGES, target=0),
        reader if kind in (None, "run") else comm(kind, "reader", COMPUTE, source=0),
        run("last", COMPUTE, reads=(0,), frees=(0,)),
    ]
    assert _shared(slots, tasks)[0] == {}
    plain = [Slot("x", "temp", TensorType((4,), "float32"))]
    tasks[1] = run("reader", OTHER, reads=(0,))
    assert _shared(plain, tasks)[0] == {0: 0}
    assert share_buffers(plain, tasks, {2: [0]}, [set(), set(), set()], keep=(0,)) == {}


def _buffers(plan: Plan) -> list[tuple[int, int]]:
    """Per class, how many slots are received, and how many buffers they have."""
    found = []
    for part in plan.classes:
        received = [part.slots[w] for t in part.tasks if t.kind == "recv" for w in t.writes]
        assert all(slot.pool >= 0 for slot in received)
        found.append((len(received), len({slot.pool for slot in received})))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_the_number_of_buffers_does_not_grow_with_microbatches(schedule: str) -> None:
    few, many = (
        program_of("untagged").apply(parallel(pp=2, microbatches=m, schedule=schedule)).lower()
        for m in (4, 8)
    )
    for (received, buffers), (twice, same) in zip(
        _buffers(few.plan), _buffers(many.plan), strict=True
    ):
        assert twice == 2 * received
        assert same <= buffers + 1 and same < twice / 2


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_a_buffer_never_meet(name: str) -> None:
    """By all pairs: every use of the one is complete before any of the other starts."""
    for part in plan_of(name).classes:
        local = Local(part.tasks, part.slots)
        sharing: dict[int, list[int]] = {}
        for index, slot in enumerate(part.slots):
            if slot.pool >= 0:
                sharing.setdefault(slot.pool, []).append(index)
        uses: dict[int, list[int]] = {}
        for index, task in enumerate(part.tasks):
            for used in {*task.reads, *task.writes, *task.frees}:
                uses.setdefault(used, []).append(index)
        assert set(sharing) == set(range(len(sharing))), "numbers without gaps"
        for slots in sharing.values():
            assert len({(slot_bytes(part.slots[s]), local.use[s]) for s in slots}) == 1
            turns = sorted(slots, key=lambda s: uses[s][0])
            for one, other in itertools.pairwise(turns):
                for a in uses[one]:
                    assert all(local.ordered(a, b) for b in uses[other])


def test_a_buffer_counts_once_and_all_the_time() -> None:
    plan = plan_of("pp4")
    for part, peak in zip(plan.classes, peaks(compressed(plan)), strict=True):
        use = memory_use(part.slots, part.tasks)
        buffers = {slot.pool: (slot, use[i]) for i, slot in enumerate(part.slots) if slot.pool >= 0}
        for memory in ("saved", "buffers"):
            least = sum(slot_bytes(slot) for slot, use in buffers.values() if use == memory)
            assert peak.by_category[memory] >= least > 0 or least == 0
        assert sum(peak.by_category.values()) == peak.total


def test_a_receive_says_whose_buffer_it_takes() -> None:
    job = program_of("untagged").apply(parallel(pp=2, microbatches=8)).lower(optimizer=ADAMW)
    (_, part) = job.plan.classes
    receives = [t for t in part.tasks if t.kind == "recv" and t.waits]
    assert "takes the buffer of " in job.explain(receives[-1].name)
    check_plan(job.plan)
