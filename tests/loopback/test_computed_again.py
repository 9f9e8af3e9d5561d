"""Under a memory limit, what is cheap is computed again where that spares more communication."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.check import check_plan, most_bytes
from piper.compiler.cadence_costs import choice_seconds, moved
from piper.cost.estimate import NOMINAL
from piper.cost.machine import Link, Machine
from piper.errors import CheckError
from piper.ir.nodes import ONCE
from piper.plan.memory_use import memory_use
from piper.plan.types import Plan, plan_from_json
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device

pytestmark = pytest.mark.xdist_group("computed again")

WIDTH, LAYERS = 16, 4
FAST, SLOW = (
    msgspec.structs.replace(NOMINAL, node=Link(0.0, rate), network=Link(0.0, rate), bandwidth=1e9)
    for rate in (1e15, 1e3)
)


class Block(nn.Module):
    """A gated feed-forward behind a norm, and dropout: most of what it saves is cheap to make."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


def _batch(seed: int, rows: int = 1024) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)


@cache
def _program() -> piper.Program:
    return piper.trace(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))).double(),
        _batch(0),
        lambda model, batch: model(batch).square().mean(),
    )


def _job(limit: int | None = None, *, machine: Machine = NOMINAL, **options: Any) -> Job:
    options = {"zero": 3, **options}
    strategy = parallel(dp=2, microbatches=4, bucket_size="16KiB", **options)
    optimizer = piper.adamw(lr=1e-2)
    return _program().apply(strategy).lower(
        optimizer=optimizer, memory_limit=limit, machine=machine
    )  # fmt: skip


def _all(**options: Any) -> Plan:
    """Everything held all step."""
    return _job(reuse="step", reduce_every="step", **options).plan


def _saved(plan: Plan) -> int:
    (part,) = plan.classes
    uses = zip(part.slots, memory_use(part.slots, part.tasks), strict=True)
    return sum(slot.type.nbytes for slot, use in uses if use == "saved")


def test_memory_for_parameters_comes_from_computing_again() -> None:
    """It moves as little as without a limit, in less memory, and trains as one device does."""
    whole, less = most_bytes(_all()), most_bytes(_all(recompute="expensive"))
    assert less < whole
    job = _job((whole + less) // 2)
    (chosen,) = job.plan.cadences
    assert (chosen.reduce_every, chosen.reuse, chosen.again) == (ONCE, ONCE, "expensive")
    assert "what is cheap is computed again in backwards" in job.summary()
    assert moved(job.plan) == moved(_all()) and _saved(job.plan) < _saved(_all())
    assert most_bytes(job.plan) <= (whole + less) // 2
    batches = [_batch(seed) for seed in range(3)]
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
        run.evaluate(batches[0])
    assert errors.exact, errors
    assert plan_from_json(job.plan.to_json()) == job.plan


def test_plans_of_other_shapes_compute_again_too() -> None:
    whole, less = most_bytes(_all()), most_bytes(_all(recompute="expensive"))
    job = _job((whole + less) // 2)
    batches = [_batch(0), _batch(1, rows=512), _batch(2)]
    with job.launch("loopback") as run:
        errors = compare(run, batches, train_one_device(job, batches))
        (other,) = (
            member.workers["train 2"].plan
            for member in run.workers.pool.members[:1]  # type: ignore[attr-defined]
        )
    assert errors.exact, errors
    assert other.cadences == job.plan.cadences and 2 * _saved(other) == _saved(job.plan)


def test_it_is_left_where_it_takes_longer_than_it_spares() -> None:
    """With gathers for each use this fits as it is; a link decides whether that is slower."""
    limit = most_bytes(_all()) - 1
    fast, slow = (_job(limit, machine=machine).plan for machine in (FAST, SLOW))
    assert not fast.cadences[0].again and slow.cadences[0].again
    assert moved(slow) < moved(fast) and most_bytes(fast) <= limit
    for machine, better, worse in ((SLOW, slow, fast), (FAST, fast, slow)):
        taken = [choice_seconds(plan, fast, machine) for plan in (better, worse)]
        assert taken[0] < taken[1]


@pytest.mark.parametrize("zero", [2, 3])
def test_it_is_taken_where_nothing_fits_whatever_is_smallest(zero: int) -> None:
    """What moves least may also take least memory."""
    plain, again = (
        min(most_bytes(_job(zero=zero, recompute=keep, reduce_every=e).plan) for e in (1, "step"))
        for keep in ("everything", "expensive")
    )
    plan = _job((plain + again) // 2, zero=zero, machine=FAST).plan
    assert plan.cadences[0].again and "without that" in plan.cadences[0].reason


def test_all_is_computed_again_where_that_is_what_fits_or_what_is_faster() -> None:
    """A link so slow that no operation counts; or a limit that leaves no choice."""
    cheap, nothing = (most_bytes(_all(recompute=keep)) for keep in ("expensive", "nothing"))
    assert nothing < cheap
    job = _job(cheap - 1, machine=SLOW)
    (chosen,) = job.plan.cadences
    assert (chosen.reuse, chosen.again) == (ONCE, "nothing")
    assert "all is computed again in backwards" in job.summary()
    assert "estimated to take the least time" in chosen.reason
    batches = [_batch(seed) for seed in range(2)]
    with job.launch("loopback", adversary=True) as run:
        errors = compare(run, batches, train_one_device(job, batches))
    assert errors.exact, errors
    least = min(
        most_bytes(_job(recompute="expensive", reuse=1, reduce_every=every).plan)
        for every in (1, "step")
    )
    plan = _job(least - 1, machine=FAST).plan
    assert plan.cadences[0].again == "nothing" and "without that" in plan.cadences[0].reason


def test_it_is_taken_where_nothing_fits_without_it() -> None:
    least = min(most_bytes(_job(reuse=1, reduce_every=every).plan) for every in (1, "step"))
    plan = _job(least - 1, machine=FAST).plan
    assert plan.cadences[0].again and most_bytes(plan) < least
    with pytest.raises(CheckError, match="limit") as found:
        _job(least // 4)
    assert "recompute" not in str(found.value)  # which was tried
    with pytest.raises(CheckError, match="limit") as found:
        _job(least // 4, recompute="everything")
    assert "recompute(...)" in str(found.value)


@pytest.mark.parametrize("name", ["expensive", "everything"])
def test_a_user_may_want_nothing_computed_again(name: str) -> None:
    limit = most_bytes(_all()) - 1
    plan = _job(limit, recompute=name, machine=SLOW).plan
    assert not plan.cadences[0].again and most_bytes(plan) <= limit
    assert (_saved(plan) == _saved(_all())) == (name == "everything")
    assert (moved(plan) > moved(_all())) == (name == "everything")


def test_it_is_the_users_where_the_user_speaks_of_it() -> None:
    limit = most_bytes(_all(recompute="nothing")) - 1
    plan = _job(limit, recompute="nothing", machine=SLOW).plan
    (chosen,) = plan.cadences
    assert not chosen.again and most_bytes(plan) <= limit
    wrong = msgspec.structs.replace(chosen, again="nothing")
    with pytest.raises(CheckError, match="computed again by choice"):
        check_plan(msgspec.structs.replace(plan, cadences=(wrong,)))


def test_with_enough_memory_nothing_is_computed_again() -> None:
    plan = _job(most_bytes(_all()), machine=SLOW).plan
    assert not plan.cadences[0].again and _saved(plan) == _saved(_all())
