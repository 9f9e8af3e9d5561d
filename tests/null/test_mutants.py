"""The checker refuses every fault that is planted in a good plan, for the right reason."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from piper.check import World, check_plan, compressed, expanded, problems
from piper.errors import CheckError
from piper.ir.communication import COMMUNICATION
from piper.passes import lower
from piper.plan.slots import Slot
from piper.plan.types import Plan, RankClass
from piper.strategies import parallel
from tests.cast_faults import CAST_FAULTS
from tests.faults import FAULTS, Fault
from tests.part_faults import PART_FAULTS
from tests.plans import NAMES, plan_of
from tests.pool_faults import POOL_FAULTS
from tests.update_faults import UPDATE_FAULTS
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("mutants")
Record = Callable[[str, object], None]
ALL = FAULTS | CAST_FAULTS | PART_FAULTS | POOL_FAULTS | UPDATE_FAULTS
PLACES = 24  # of one kind in one plan; where there are more, so many at random
PLANS = tuple(name for name in NAMES if name != "pp_dp8_ep")


@pytest.mark.parametrize("name", PLANS)
def test_good_plans_are_accepted(name: str) -> None:
    plan = plan_of(name)
    report = check_plan(plan)
    assert report.num_tasks == sum(len(part.tasks) for part in plan.classes)
    assert report.num_updates == sum(
        task.kind == "update" for part in plan.classes for task in part.tasks
    )
    assert problems(expanded(plan)) == []
    most = max(peak.total for peak in report.peaks)
    check_plan(plan, memory_limit=most)


def _planted(kind: str) -> list[Fault]:
    found = []
    for name in PLANS:
        places = list(ALL[kind](plan_of(name)))
        found += random.Random(name).sample(places, min(PLACES, len(places)))
    return found


@pytest.mark.parametrize("kind", [k for k in ALL if k not in ("dropped_wait", "crossed_ranks")])
def test_every_fault_is_refused_for_its_reason(kind: str, record_property: Record) -> None:
    planted = _planted(kind)
    reasons: Counter[str] = Counter()
    for fault in planted:
        found = problems(fault.world or fault.plan, memory_limit=fault.memory_limit)
        assert found, f"{kind} accepted: {sorted(fault.tasks)}"
        assert found[0].proof in fault.proofs, f"{kind} at {sorted(fault.tasks)}: {found[0]}"
        named = {name for p in found if p.proof in fault.proofs for name in p.tasks}
        assert named & fault.tasks, f"{sorted(fault.tasks)} not among {sorted(named)}"
        assert found[0].witness
        if fault.world is None and not reasons:
            with pytest.raises(CheckError, match=f"^{found[0].proof}: "):
                check_plan(fault.plan, memory_limit=fault.memory_limit)
        reasons[found[0].proof] += 1
    record_property("planted", f"{kind}: {len(planted)} planted, all refused: {dict(reasons)}")
    assert len(planted) >= 4


def test_a_dropped_wait_is_refused_where_nothing_else_orders_the_tasks(
    record_property: Record,
) -> None:
    """Against all pairs of tasks that touch one element, by brute force."""
    refused: Counter[str] = Counter()
    legal = held = 0
    for fault in _planted("dropped_wait"):
        number, index = fault.where
        races = _races(fault.plan, fault.plan.classes[number])
        found = problems(fault.plan)
        pairs = {frozenset(p.tasks) for p in found if p.proof in ("events", "pools")}
        if races:
            assert found and pairs <= races and pairs
            refused["events" if any(p.proof == "events" for p in found) else "pools"] += 1
        elif fault.plan.classes[number].tasks[index].kind == "all_gather" and found:
            assert {p.proof for p in found} == {"gathers"}  # it may start too early
            refused["gathers"] += 1
        else:
            assert found == []
            kind = fault.plan.classes[number].tasks[index].kind
            held += kind in ("recv", "add")  # they wait only so that less memory is in use at once
            legal += kind not in ("recv", "add")
    text = f"dropped_wait: {dict(refused)} refused, {legal} legal: ordered by another path"
    record_property("planted", f"{text}, {held} legal: they only bound memory")
    assert refused["events"] > 10 * legal and refused["gathers"] and refused["pools"]


def _races(plan: Plan, part: RankClass) -> set[frozenset[str]]:
    """All pairs of tasks that touch an element, one of them to change it, in no sure order."""
    done: list[int] = []  # per task, a bit for each task that is complete when it starts
    blocked = 0
    for index, task in enumerate(part.tasks):
        known = blocked
        for other in range(index):
            if part.tasks[other].stream == task.stream or other in task.waits:
                known |= done[other] | 1 << other
        done.append(known)
        if task.kind == "read":
            blocked = known | 1 << index
    found = set()
    elements = [_elements(plan, part, slot) for slot in part.slots]
    touched: dict[int, list[tuple[int, bool, range]]] = {}
    for index, task in enumerate(part.tasks):
        for slots, changes in ((task.reads, False), (task.writes, True), (task.frees, True)):
            for slot in slots:
                for root, where in elements[slot]:
                    touched.setdefault(root, []).append((index, changes, where))
    for uses in touched.values():
        for (a, one, here), (b, other, there) in itertools.combinations(uses, 2):
            meet = here.start < there.stop and there.start < here.stop
            if a != b and meet and (one or other):
                first, second = min(a, b), max(a, b)
                if not done[second] >> first & 1:
                    found.add(frozenset((part.tasks[first].name, part.tasks[second].name)))
    return found


def _elements(plan: Plan, part: RankClass, slot: Slot) -> list[tuple[int, range]]:
    """Where a slot lies in memory, for each rank that a shard may belong to."""
    size = math.prod(slot.shape) if slot.bound is None else 1 << 40
    root = part.slots.index(slot)
    starts = [0]
    while slot.base >= 0:
        if slot.kind == "shard":
            parts = plan.mesh.size_of(plan.buckets[slot.bucket].over)
            starts = [s + rank * size for s in starts for rank in range(parts)]
        else:
            starts = [s + slot.offset for s in starts]
        root, slot = slot.base, part.slots[slot.base]
    if slot.pool >= 0:
        root, size = -1 - slot.pool, 1  # its buffer
    return [(root, range(start, start + max(size, 1))) for start in starts]


def test_ranks_that_wait_for_each_other_are_refused(record_property: Record) -> None:
    """Against running two steps: a send that waits for a later message of its peer, or of another."""
    stuck = 0
    planted = _planted("crossed_ranks")
    for fault in planted:
        found = problems(fault.plan)
        crossed = [p for p in found if p.proof in fault.proofs]
        runs = _runs(expanded(fault.plan))
        assert bool(crossed) == (not runs), (sorted(fault.tasks), found)
        assert runs == _runs(compressed(fault.plan))
        if not runs:
            assert {name for p in crossed for name in p.tasks} & fault.tasks
            stuck += 1
    text = f"crossed_ranks: {len(planted)} planted, {stuck} deadlock and are refused"
    record_property("planted", f"{text}, the others run")
    assert stuck > 20


def _runs(world: World, steps: int = 2) -> bool:
    """Whether all parties end all steps; a message carries its key, and waits for who receives it."""
    done = {p.number: 0 for p in world.parties}  # steps
    complete: dict[int, set[int]] = {p.number: set() for p in world.parties}
    boxes: dict[tuple[int, int, int], list[str]] = {}
    awaited: Counter[tuple[int, int, int]] = Counter()
    posted: set[tuple[int, int, int]] = set()
    entered: dict[tuple[object, ...], list[set[int]]] = {}
    turn: Counter[tuple[object, ...]] = Counter()
    joined: dict[tuple[int, int, int], tuple[tuple[object, ...], int]] = {}
    moved = True
    while moved:
        moved = False
        for party in world.parties:
            me = party.number
            if done[me] == steps:
                continue
            heads: set[int] = set()
            for index, task in enumerate(party.tasks):
                if index in complete[me]:
                    continue
                ready = task.stream not in heads and complete[me].issuperset(task.waits)
                heads.add(task.stream)
                if ready:
                    if task.kind == "send":
                        peer = next(m for m in party.groups[task.group] if m != me)
                        ready = awaited[me, peer, task.stream] > 0
                        if ready:
                            awaited[me, peer, task.stream] -= 1
                            boxes.setdefault((me, peer, task.stream), []).append(task.key)
                    elif task.kind == "recv":
                        peer = next(m for m in party.groups[task.group] if m != me)
                        if (me, done[me], index) not in posted:
                            posted.add((me, done[me], index))
                            awaited[peer, me, task.stream] += 1
                            moved = True
                        box = boxes.get((peer, me, task.stream))
                        ready = bool(box)
                        if box and box.pop(0) != task.key:
                            return False
                    elif task.kind in COMMUNICATION:
                        where = world.communicator(party, task)
                        if (me, done[me], index) not in joined:
                            joined[me, done[me], index] = (where, turn[(where, me)])
                            rounds = entered.setdefault(where, [])
                            if turn[(where, me)] == len(rounds):
                                rounds.append(set())
                            rounds[turn[(where, me)]].add(me)
                            turn[(where, me)] += 1
                            moved = True
                        at, number = joined[me, done[me], index]
                        ready = entered[at][number] >= set(party.groups[task.group])
                if ready:
                    complete[me].add(index)
                    heads.discard(task.stream)
                    moved = True
                elif task.kind == "read":
                    break
            if len(complete[me]) == len(party.tasks):
                done[me] += 1
                complete[me] = set()
                moved = True
    return all(count == steps for count in done.values())


def test_good_plans_run() -> None:
    for name in PLANS:
        assert _runs(expanded(plan_of(name))) and _runs(compressed(plan_of(name)))


def test_lower_checks_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that forgets its waits makes no plan."""
    good = lower.early_messages

    def careless(rank_class: RankClass) -> RankClass:
        final = good(rank_class)
        tasks = tuple(msgspec.structs.replace(task, waits=()) for task in final.tasks)
        return msgspec.structs.replace(final, tasks=tasks)

    monkeypatch.setattr(lower, "early_messages", careless)
    with pytest.raises(CheckError, match="does not wait for") as refused:
        program_of("tied").apply(parallel(pp=2, microbatches=2)).lower()
    assert "from place (" in str(refused.value), "the witness names the directive"
