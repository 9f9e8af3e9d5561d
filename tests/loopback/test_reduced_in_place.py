"""A sum of several microbatches that is reduced once: the rank's part takes its own place in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piper.api.job import Job
from piper.plan.local_order import Local
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.slots import SUMS
from piper.plan.tasks import scatters
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from tests.loopback.storages import live, unique_bytes
from tests.plans import plan_of
from tests.zoo import ADAMW, CASES, batches_of, program_of


def _job(**options: Any) -> Job:
    return program_of("tied").apply(parallel(dp=2, **options)).lower(optimizer=ADAMW)


def _in_place(job: Job) -> set[bool]:
    """Whether reductions fill a part of what they take."""
    return {
        part.slots[task.target].base == task.source
        for part in job.plan.classes
        for task in part.tasks
        if scatters(task)
    }


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_where_a_sum_is_there_for_long(zero: int) -> None:
    """A sum of one microbatch is gone as soon as it is reduced, so that it is better freed whole."""
    assert _in_place(_job(zero=zero, microbatches=2)) == {True}
    assert _in_place(_job(zero=zero, microbatches=1)) == {False}
    if zero > 1:
        assert _in_place(_job(zero=zero, microbatches=2, reduce_every=1)) == {False}


@pytest.mark.parametrize("adversary", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_take_no_memory_beside_their_sums(zero: int, adversary: bool) -> None:
    """While a step runs; then the rank's part is left, and is gone when the next step begins."""
    job = _job(zero=zero, microbatches=2)
    wholes = sum(bucket.size * 8 for bucket in job.plan.buckets)
    most, kept = 0, []

    def observe(worker: Worker) -> None:
        nonlocal most
        sums = live(worker, lambda slot: slot.kind in ("grad", *SUMS) and slot.bucket >= 0)
        most = max(most, unique_bytes(sums))

    with job.launch("loopback", adversary=adversary, observe=observe) as run:
        for batch in batches_of("tied"):
            run.step(batch)
            for worker in run.workers.workers:  # type: ignore[attr-defined]
                kept.append(unique_bytes(live(worker, lambda slot: slot.kind == "grad")))
                assert not live(worker, lambda slot: slot.kind in SUMS and slot.bucket >= 0)
    assert most == wholes and set(kept) == {wholes // 2}


def test_gradients_before_the_first_step_are_zeros() -> None:
    with _job(zero=2, microbatches=2).launch("loopback") as run:
        before = run.gradients()
        assert before.keys() == run.parameters().keys()
        assert not any(gradient.any() for gradient in before.values())
        run.step(CASES["tied"].batch(0))
        assert all(gradient.any() for gradient in run.gradients().values())
        evaluated = run.gradients()
        run.evaluate(CASES["tied"].batch(1))
        assert all(torch.equal(evaluated[n], g) for n, g in run.gradients().items())


def test_a_plan_has_no_gradients_while_its_first_forward_runs() -> None:
    for name in ("zero1", "zero3"):
        plan = plan_of(name)
        for part in plan.classes:
            ledger = MemoryLedger(plan, Local(part.tasks, part.slots))
            parts = [slot for slot in part.slots if slot.kind == "grad"]
            shown = sum(slot.type.nbytes for slot in parts if slot.base >= 0)
            alone = sum(slot.type.nbytes for slot in parts if slot.base < 0)  # of experts: not cut
            assert (ledger.held["gradients"], ledger.left) == (alone, shown) and shown > 0
