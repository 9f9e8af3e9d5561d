"""How often gradients are reduced and parameters gathered: as said, else as fits, with one result."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from piper import Precision
from piper.api.job import Job
from piper.check import check_plan, compressed, most_bytes
from piper.cost.estimate import NOMINAL
from piper.cost.machine import Link
from piper.errors import AxisError, CheckError
from piper.ir.nodes import ONCE
from piper.plan.cadence import Cadence
from piper.plan.report.volume import communication
from piper.plan.slots import SUMS
from piper.plan.tasks import Add, scatters
from piper.plan.types import Plan, plan_from_json
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("cadences")

MICROBATCHES = 4
CADENCES = (None, 1, 2, 3, MICROBATCHES, "step")


def _job(zero: int = 3, *, limit: int | None = None, schedule: str = "1f1b", **options: Any) -> Job:
    strategy = parallel(
        pp=2, dp=2, zero=zero, microbatches=MICROBATCHES, schedule=schedule,
        bucket_size=300, **options,
    )  # fmt: skip
    return program_of("deep").apply(strategy).lower(optimizer=ADAMW, memory_limit=limit)


def _count(plan: Plan, kind: str) -> int:
    """Of the first class."""
    return sum(task.kind == kind for task in plan.classes[0].tasks)


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("every", CADENCES)
def test_every_cadence_trains_as_one_device(every: Any, zero: int, adversary: bool) -> None:
    reuse = {None: None, 1: 1}.get(every, "step") if zero == 3 else None
    job = _job(zero, reduce_every=every, reuse=reuse)
    with job.launch("loopback", adversary=adversary, seed=zero) as run:
        errors = compare(run, batches_of("deep"), reference_of("deep", job))
    assert errors.exact, errors


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("every", [1, 2, 3, "step"])
def test_reductions_are_as_many_as_was_asked(every: Any, schedule: str) -> None:
    plan = _job(2, reduce_every=every, schedule=schedule).plan
    turns = 1 if every == "step" else -(-plan.num_microbatches // every)
    for part in plan.classes:
        buckets = [b for b in plan.buckets if part.slice in b.slices and b.over]
        scatters = [task for task in part.tasks if task.kind == "reduce_scatter"]
        assert len(scatters) == turns * len(buckets)


@pytest.mark.parametrize("every", CADENCES)
def test_every_cadence_has_casts_for_the_wire(every: Any) -> None:
    """A float32 wire of a float64 model: as near to one device as that, and all proofs hold."""
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=MICROBATCHES, reduce_every=every)
    wire = Precision(wire="float32")
    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW, precision=wire)
    with job.launch("loopback", adversary=True, seed=3) as run:
        errors = compare(run, batches_of("deep")[:1], train_one_device(job, batches_of("deep")[:1]))
    assert errors.loss < 1e-15 and 1e-10 < errors.gradient < 1e-5


def test_what_is_said_to_move_is_in_the_dtype_of_the_wire() -> None:
    strategy = parallel(dp=2, zero=2, microbatches=4)
    program = program_of("dense").apply(strategy)
    (wide,), (narrow,) = (
        program.lower(precision=Precision(wire=wire)).plan.cadences for wire in (None, "float32")
    )
    said = r"and ([\d.]+) KiB a step are moved"
    sizes = [re.search(said, cadence.reason) for cadence in (wide, narrow)]
    assert sizes[0] and sizes[1]
    assert float(sizes[0][1]) == pytest.approx(2 * float(sizes[1][1]), rel=0.05)


def test_backwards_in_any_order_have_their_turns() -> None:
    """Looped BFS goes back from the last microbatch: the turn that has fewer may come first."""
    strategy = parallel(pp=2, dp=2, zero=3, microbatches=4, schedule="looped_bfs", reduce_every=3)
    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW)
    with job.launch("loopback", adversary=True, seed=1) as run:
        errors = compare(run, batches_of("deep"), reference_of("deep", job))
    assert errors.exact, errors


@pytest.mark.parametrize("every", [1, 2])
def test_no_sum_starts_while_two_others_wait_for_their_reduction(every: int) -> None:
    """Whatever the timing: of the sums that are whole, all but one are surely reduced by then."""
    world = compressed(_job(2, reduce_every=every).plan)
    starts = 0
    for party in world.distinct:
        local = world.local(party)
        whole: list[int] = []  # reductions that were dispatched
        begun: set[int] = set()
        for index, task in enumerate(party.tasks):
            if scatters(task):
                whole.append(index)
                begun.discard(task.source)
            for slot in task.sums if isinstance(task, Add) else ():
                if party.slots[slot].kind in SUMS and party.slots[slot].bucket >= 0:
                    if slot not in begun:
                        assert sum(not local.ordered(each, index) for each in whole) <= 1
                        starts += 1
                    begun.add(slot)
                    same = [s for s in begun if party.slots[s].bucket == party.slots[slot].bucket]
                    assert same == [slot]
    assert starts > 20


@pytest.mark.parametrize("every", [1, 2])
def test_parts_that_came_are_added_before_more_of_them_are_wanted(every: int) -> None:
    """However slow links are taken to be, the parts of all microbatches share a few buffers."""
    slow = msgspec.structs.replace(NOMINAL, node=Link(1e-3, 1e5), network=Link(1e-3, 1e5))
    strategy = parallel(dp=2, zero=2, microbatches=8, reduce_every=every)
    plan = program_of("dense").apply(strategy).lower(optimizer=ADAMW, machine=slow).plan
    slots = [slot for slot in plan.classes[0].slots if slot.name.startswith("$part")]
    assert len(slots) == 8 // every * len(plan.buckets)
    assert len({slot.pool for slot in slots}) <= 3 * len(plan.buckets)


def test_parameters_are_gathered_once_a_step() -> None:
    each, pairs, once = (_job(reuse=uses).plan for uses in (1, 2, "step"))
    buckets = sum(b.over != () and each.classes[0].slice in b.slices for b in each.buckets)
    assert _count(once, "all_gather") == buckets
    assert _count(each, "all_gather") > _count(pairs, "all_gather") > buckets
    assert most_bytes(once) > most_bytes(each)


def test_what_is_open_is_chosen_and_said() -> None:
    job = _job()
    (chosen,) = job.plan.cadences
    assert (chosen.reduce_every, chosen.reuse) == (ONCE, 1)
    assert (
        "gradients are reduced once a step, parameters are gathered for each use: "
        "no memory limit was given" in job.summary()
    )
    assert _job(reduce_every=2, reuse=1).plan.cadences == ()
    (half,) = _job(reduce_every=2).plan.cadences
    assert (half.reduce_every, half.reuse) == (None, 1)
    assert _job(1).plan.cadences == ()


def test_under_a_limit_the_fewest_bytes_that_fit_are_moved() -> None:
    """From all memory to the least: ever more communication, never above the limit."""
    most = most_bytes(_job(reuse="step", reduce_every="step").plan)
    least = most_bytes(_job(reuse=1, reduce_every=1).plan)
    assert least < most
    moved = []
    for limit in (most, most - 1, (most + least) // 2, least):
        plan = _job(limit=limit).plan
        (chosen,) = plan.cadences
        assert most_bytes(plan) <= limit
        assert "of what fits into" in chosen.reason
        moved.append(_count(plan, "all_gather") + _count(plan, "reduce_scatter"))
    assert moved == sorted(moved) and moved[0] < moved[-1]


def test_what_memory_is_left_keeps_some_buckets_all_step() -> None:
    """Each byte more is used, and one rank that is full does not keep others from it."""
    least, most = (most_bytes(_job(reuse=uses, reduce_every=1).plan) for uses in (1, "step"))
    found, some = {}, []
    for limit in range(least, most, (most - least) // 8):
        job = _job(limit=limit, reduce_every=1, recompute="everything")
        (chosen,) = job.plan.cadences
        assert chosen.reuse in (ONCE, 1) and most_bytes(job.plan) <= limit
        assert bool(chosen.kept) == ("once a step" in str(chosen))
        parts = (communication(job.plan, part) for part in job.plan.classes)
        found[limit] = sum(part["gather", "all_gather"][1] for part in parts)
        some += [job] if chosen.kept else []
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert len(some) > 3 and len(set(found.values())) > 3
    job = some[len(some) // 2]
    with job.launch("loopback", adversary=True, seed=2) as run:
        errors = compare(run, batches_of("deep"), reference_of("deep", job))
    assert errors.exact, errors
    plan = some[-1].plan
    (chosen,) = plan.cadences
    for wrong in (chosen.kept[1:], (), (*chosen.kept, 99), (*chosen.kept, -1)):
        with pytest.raises(CheckError, match="kept"):
            check_plan(
                msgspec.structs.replace(
                    plan, cadences=(msgspec.structs.replace(chosen, kept=wrong),)
                )
            )
    assert some[-1].evaluation().plan.cadences == plan.cadences
    with pytest.raises(CheckError, match="limit"):
        _job(limit=least // 2)


def test_an_evaluation_keeps_the_choice() -> None:
    job = _job(reduce_every=1)
    assert job.evaluation().plan.cadences == job.plan.cadences != ()


def test_choices_of_a_file_are_held_to_the_directives() -> None:
    plan = _job().plan
    assert plan_from_json(plan.to_json()) == plan
    (chosen,) = plan.cadences
    wrong = (
        (),  # the directive leaves it open, the plan gathers once for several uses
        (msgspec.structs.replace(chosen, reuse=-1),),
        (msgspec.structs.replace(chosen, origin=99),),
        (chosen, chosen),
        (msgspec.structs.replace(chosen, reduce_every=1),),
        (Cadence(0, 1, 1, ""),),
    )
    for cadences in wrong[1:]:
        with pytest.raises(CheckError):
            check_plan(msgspec.structs.replace(plan, cadences=cadences))
    shared = _job(limit=most_bytes(_job(reuse="step", reduce_every="step").plan)).plan
    assert shared.cadences[0].reuse != 1
    with pytest.raises(CheckError, match="kept too long"):
        check_plan(msgspec.structs.replace(shared, cadences=wrong[0]))


def test_gradients_that_stay_whole_are_reduced_once() -> None:
    with pytest.raises(AxisError, match="reduce_every=2 with zero=1"):
        _job(1, reduce_every=2)
    assert _job(1, reduce_every="step").plan.classes == _job(1).plan.classes
