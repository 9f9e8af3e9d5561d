"""Buffers of a run: received tensors lie in few, the same in every step; a turn too early is noticed."""

from __future__ import annotations

import msgspec
import pytest
import torch

from piper.api.job import Job
from piper.api.run import Run
from piper.plan.memory_use import memory_use
from piper.plan.types import Plan
from piper.runtime.worker.worker import Worker
from piper.training.verify import train_one_device
from tests.loopback.faults import noticed, without_waits
from tests.loopback.pools import loopback
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("skip")


def _job() -> Job:
    return program_of("skip").apply(strategy_of("pp2", "1f1b")).lower(optimizer=ADAMW)


def test_received_tensors_lie_in_the_buffers_in_every_step() -> None:
    job = _job()
    held: dict[int, set[int]] = {}  # rank -> addresses

    def observe(worker: Worker) -> None:
        for slot, tensor in zip(worker.me.slots, worker.slots, strict=True):
            if slot.pool >= 0 and tensor is not None:
                assert tensor.shape == slot.shape and tensor.dtype == getattr(torch, slot.dtype)
                held.setdefault(worker.me.rank, set()).add(tensor.untyped_storage().data_ptr())

    engine = loopback(job.plan, job.bodies, observe=observe)
    run = Run(job.plan, engine)
    seen = []
    for batch in batches_of("skip")[:2]:
        held.clear()
        run.step(batch)
        seen.append({rank: set(found) for rank, found in held.items()})
        assert all(
            worker.slots[i] is None
            for worker in engine.workers
            for i, slot in enumerate(worker.me.slots)
            if slot.pool >= 0
        )
    assert seen[0] == seen[1]
    for worker in engine.workers:
        pools = {slot.pool for slot in worker.me.slots if slot.pool >= 0}
        received = sum(task.kind == "recv" for task in worker.me.tasks)
        assert len(seen[0][worker.me.rank]) == len(pools) < received


def _one_buffer(plan: Plan) -> Plan:
    """All slots that could share a buffer by their size do."""
    classes = []
    for part in plan.classes:
        first: dict[object, int] = {}
        slots = [
            msgspec.structs.replace(s, pool=first.setdefault((s.shape, s.dtype, use), s.pool))
            if s.pool >= 0
            else s
            for s, use in zip(part.slots, memory_use(part.slots, part.tasks), strict=True)
        ]
        classes.append(msgspec.structs.replace(part, slots=tuple(slots)))
    return msgspec.structs.replace(plan, classes=tuple(classes))


def test_the_adversary_notices_a_turn_too_early() -> None:
    job = _job()
    batches = batches_of("skip")[:1]
    reference = train_one_device(job, batches)
    assert noticed(job, job.plan, batches, reference) == ""
    assert noticed(job, without_waits(job.plan, "recv", "run"), batches, reference)
    shared = _one_buffer(job.plan)
    assert shared != job.plan
    assert noticed(job, shared, batches, reference) == "wrong numbers"
