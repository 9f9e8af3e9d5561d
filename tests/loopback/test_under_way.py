"""No more microbatches that nobody has ordered are under way than pay; fewer under a memory limit, and
backwards compute again, whatever directives leave open."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from piper.api.job import Job
from piper.check import check_plan, compressed, expanded, most_bytes, problems
from piper.errors import CheckError
from piper.plan.types import Plan, plan_from_json
from piper.plan.under_way import most_under_way
from piper.strategies import parallel
from piper.training.verify import compare
from tests.tensor_zoo import CASES, batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")

WAY: dict[str, Any] = {"tp": 2, "dp": 2, "microbatches": 4}
PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 4, "schedule": "1f1b"}


def _job(limit: int | None = None, *, name: str = "dense", **degrees: Any) -> Job:
    strategy = parallel(**(degrees or WAY))
    return program_of(name).apply(strategy).lower(optimizer=ADAMW, memory_limit=limit)


def _under_way(plan: Plan) -> int:
    (part,) = plan.classes
    return most_under_way(part.tasks, ["MB"])[0]


def _ladder() -> list[Job]:
    """Jobs under limits that each leave no room for what was chosen before."""
    found = [_job()]
    with pytest.raises(CheckError, match="limit") as error:
        while True:
            found.append(_job(most_bytes(found[-1].plan) - 1))
    assert "recompute(...)" not in str(error.value)  # which was tried, but for whole layers
    return found


def _bound(job: Job) -> int:
    (chosen,) = job.plan.cadences
    return chosen.under_way


def _exact(job: Job, name: str = "dense") -> None:
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
        run.evaluate(batches_of(name)[0])
    assert errors.exact, errors


def test_no_more_microbatches_are_under_way_than_pay() -> None:
    """Without a limit; more would take more memory and no less time."""
    job = _job()
    assert _bound(job) == _under_way(job.plan) == 2
    text = "at most 2 microbatches are under way: no more are faster"
    assert f"s.split(where(), 'MB', 4): {text}" in job.summary()
    assert plan_from_json(job.plan.to_json()) == job.plan
    _exact(job)
    unbound = _job(10**9)  # a limit that binds nothing
    assert _bound(unbound) == 2 and most_bytes(unbound.plan) == most_bytes(job.plan)


def test_fewer_are_under_way_and_backwards_compute_again_where_they_do_not_fit() -> None:
    jobs = _ladder()
    for before, job in pairwise(jobs):
        assert most_bytes(job.plan) < most_bytes(before.plan)
        assert not _bound(job) or _under_way(job.plan) <= _bound(job)
    found = [(c.under_way, c.again) for job in jobs for c in job.plan.cadences]
    assert {(2, "expensive"), (1, ""), (1, "nothing")} <= set(found)
    turns = jobs[found.index((1, ""))]
    assert (
        "s.split(where(), 'MB', 4): microbatches run one after the other: nothing"
        in turns.summary()
    )
    for job in (turns, jobs[found.index((2, "expensive"))], jobs[-1]):
        _exact(job)


@pytest.mark.parametrize("zero", [0, 1])
def test_pipelines_compute_again_and_keep_their_order(zero: int) -> None:
    degrees = {**PIPELINE, "dp": 2, "zero": zero}
    most = most_bytes(_job(name="dropout", **degrees).plan)
    job = _job(most - 1, name="dropout", **degrees)
    (chosen,) = job.plan.cadences
    assert chosen.again and not chosen.under_way and most_bytes(job.plan) < most
    assert "is computed again in backwards: nothing fits" in job.summary()
    _exact(job, "dropout")


def test_who_speaks_of_recomputing_is_not_overruled() -> None:
    with pytest.raises(CheckError, match="limit"):
        _job(most_bytes(_job(**PIPELINE).plan) - 1, recompute="everything", **PIPELINE)


def test_plans_of_other_shapes_take_turns_too() -> None:
    job = _ladder()[-1]
    short = {name: leaf[:, :4] for name, leaf in CASES["dense"].batch(1).items()}
    with job.launch("loopback") as run:
        run.step(short)
        plan = run.workers.pool.members[0].workers["train 2"].plan  # type: ignore[attr-defined]
        run.evaluate(short)
    assert plan.cadences == job.plan.cadences and _under_way(plan) == 1


def test_more_microbatches_beside_each_other_than_chosen_are_refused() -> None:
    plain, turns = _job().plan, _ladder()[-1].plan
    for number in (1, 2):
        (chosen,) = (msgspec.structs.replace(each, under_way=number) for each in turns.cadences)
        world = compressed(msgspec.structs.replace(plain, cadences=(chosen,)))
        wanted = {"turns"} if number == 1 else set()
        for each in (world, expanded(world.plan)):
            assert {found.proof for found in problems(each)} == wanted
    (chosen,) = turns.cadences
    for false in ({"origin": 0}, {"under_way": -1}):  # the mesh
        (elsewhere,) = (msgspec.structs.replace(each, **false) for each in turns.cadences)
        with pytest.raises(CheckError, match="microbatches under way are chosen for"):
            check_plan(msgspec.structs.replace(turns, cadences=(elsewhere,)))
