"""Under a memory limit, microbatches that nobody has ordered run one after the other, and backwards
compute again, whatever directives leave open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from piper.api.job import Job
from piper.check import check_plan, compressed, expanded, most_bytes, problems
from piper.errors import CheckError
from piper.plan.tasks import Run, microbatch_of
from piper.plan.types import Plan, plan_from_json
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


def _microbatches(plan: Plan) -> list[int]:
    (part,) = plan.classes
    return [microbatch_of(task, ["MB"])[0] for task in part.tasks if isinstance(task, Run)]


def _exact(job: Job, name: str = "dense") -> None:
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
        run.evaluate(batches_of(name)[0])
    assert errors.exact, errors


def test_microbatches_run_one_after_the_other_where_they_do_not_fit_beside_each_other() -> None:
    plain = _job()
    assert _microbatches(plain.plan) != sorted(_microbatches(plain.plan))
    most = most_bytes(plain.plan)
    assert _job(most).plan == plain.plan
    job = _job(most - 1)
    (chosen,) = job.plan.cadences
    assert (chosen.in_turn, chosen.again) == (True, "")
    assert _microbatches(job.plan) == sorted(_microbatches(job.plan))
    assert most_bytes(job.plan) < most
    assert (
        "s.split(where(), 'MB', 4): microbatches run one after the other: nothing" in job.summary()
    )
    assert plan_from_json(job.plan.to_json()) == job.plan
    _exact(job)


def test_then_backwards_compute_again() -> None:
    """Of all chunks, with nothing that a directive leaves open; a limit below that is refused."""
    turns = most_bytes(_job(most_bytes(_job().plan) - 1).plan)
    job = _job(turns - 1)
    (chosen,) = job.plan.cadences
    assert chosen.in_turn and chosen.again and most_bytes(job.plan) < turns
    _exact(job)
    with pytest.raises(CheckError, match="limit") as found:
        _job(turns // 4)
    assert "recompute(...)" not in str(found.value)  # which was tried, but for whole layers


@pytest.mark.parametrize("zero", [0, 1])
def test_pipelines_compute_again_and_keep_their_order(zero: int) -> None:
    degrees = {**PIPELINE, "dp": 2, "zero": zero}
    most = most_bytes(_job(name="dropout", **degrees).plan)
    job = _job(most - 1, name="dropout", **degrees)
    (chosen,) = job.plan.cadences
    assert chosen.again and not chosen.in_turn and most_bytes(job.plan) < most
    assert "is computed again in backwards: nothing fits" in job.summary()
    _exact(job, "dropout")


def test_who_speaks_of_recomputing_is_not_overruled() -> None:
    with pytest.raises(CheckError, match="limit"):
        _job(most_bytes(_job(**PIPELINE).plan) - 1, recompute="everything", **PIPELINE)


def test_plans_of_other_shapes_take_turns_too() -> None:
    job = _job(most_bytes(_job().plan) - 1)
    short = {name: leaf[:, :4] for name, leaf in CASES["dense"].batch(1).items()}
    with job.launch("loopback") as run:
        run.step(short)
        plan = run.workers.pool.members[0].workers["train 2"].plan  # type: ignore[attr-defined]
        run.evaluate(short)
    assert plan.cadences == job.plan.cadences
    (tasks,) = {part.tasks for part in plan.classes} if hasattr(plan, "classes") else {plan.tasks}
    numbers = [microbatch_of(task, ["MB"]) for task in tasks if isinstance(task, Run)]
    assert numbers == sorted(numbers)


def test_microbatches_beside_each_other_are_refused_where_turns_were_chosen() -> None:
    plain, turns = _job().plan, _job(most_bytes(_job().plan) - 1).plan
    false = msgspec.structs.replace(plain, cadences=turns.cadences)
    for world in (compressed(false), expanded(false)):
        assert {found.proof for found in problems(world)} == {"turns"}
    (chosen,) = turns.cadences
    elsewhere = msgspec.structs.replace(chosen, origin=0)  # the mesh
    with pytest.raises(CheckError, match="microbatches in turn are chosen for"):
        check_plan(msgspec.structs.replace(turns, cadences=(elsewhere,)))
