"""Law 5: what ZeRO and shard cut is measured: unique live storages per rank, for every level."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.plan.slots import SUMS, Slot
from piper.runtime.worker.storages import optimizer_tensors
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from piper.training.verify import train
from tests.loopback.storages import live, unique_bytes
from tests.zoo import ADAMW, CASES, batches_of, program_of

pytestmark = pytest.mark.xdist_group("sharding")  # its jobs are made once

LEVELS = (0, 1, 2, 3)
PADDING = 32  # bytes a parameter: where it begins, and the end of its bucket


@cache
def _single(name: str) -> Program:
    """The program of a case in float32."""
    case = CASES[name]
    return piper.trace(case.make_model, case.batch(0), case.step)


def _job(name: str, zero: int, **degrees: Any) -> Job:
    return program_of(name).apply(parallel(zero=zero, **degrees)).lower(optimizer=ADAMW)


def _held(worker: Worker, experts: bool) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, of experts or of the rest."""
    plan = worker.plan
    chosen = {
        number
        for number, bucket in enumerate(plan.buckets)
        if ("experts" in bucket.params[0]) == experts
    }
    names = {name for number in chosen for name in plan.buckets[number].params}

    def kept(slot: Slot) -> bool:
        return slot.source in names if slot.kind == "param" else slot.bucket in chosen

    parameters = live(worker, lambda s: s.kind in ("param", "flat", "shard") and kept(s))
    gradients = live(worker, lambda s: s.kind == "grad" and kept(s))
    mine = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    state = [
        tensor
        for tensor in optimizer_tensors(worker, chosen)
        if tensor.untyped_storage().data_ptr() not in mine
    ]
    return {
        "parameters": unique_bytes(parameters),
        "gradients": unique_bytes(gradients),
        "state": unique_bytes(state),
    }


def _measured(job: Job, name: str) -> list[dict[bool, dict[str, int]]]:
    with job.launch("loopback") as run:
        run.step(batches_of(name)[0])
        leftover = [
            slot.name
            for worker in run.workers.workers  # type: ignore[attr-defined]
            for slot, value in zip(worker.me.slots, worker.slots, strict=True)
            if value is not None and slot.kind in ("gathered", *SUMS) and slot.bucket >= 0
        ]
        assert leftover == []
        return [
            {experts: _held(worker, experts) for experts in (False, True)}
            for worker in run.workers.workers  # type: ignore[attr-defined]
        ]


def _whole(name: str, *, experts: bool) -> int:
    """Bytes of the model's own parameters, of experts or of the rest."""
    named = CASES[name].model().named_parameters()
    return sum(p.numel() * p.element_size() for n, p in named if ("experts" in n) == experts)


@pytest.mark.parametrize("zero", LEVELS)
def test_law_5_a_rank_holds_its_part_of_what_is_cut(zero: int) -> None:
    """Dense state is cut over all 4 data ranks; experts over 2, of which each rank has half anyway."""
    job = _job("moe", zero, dp=4, ep=2, microbatches=2, bucket_size=700)
    num_params = sum(len(bucket.params) for bucket in job.plan.buckets)
    for rank in _measured(job, "moe"):
        for experts, ranks, owned in ((False, 4, 1), (True, 2, 2)):
            for what, first_level, times in (
                ("parameters", 3, 1),
                ("gradients", 1, 1),
                ("state", 1, 2),  # Adam's two moments
            ):
                least = times * _whole("moe", experts=experts) // owned
                if zero >= first_level:
                    least //= ranks
                found = rank[experts][what]
                assert least <= found <= least + times * num_params * PADDING, (what, experts)


def test_law_5_a_pipeline_rank_holds_only_its_stages() -> None:
    """Two of four equal stages a rank, and half of each; the embedding is tied to the head."""
    job = _job("deep", 3, pp=2, dp=2, microbatches=4)
    experts, dense = (_whole("deep", experts=e) for e in (True, False))
    embedding = CASES["deep"].model().embed.weight.numel() * 8  # type: ignore[union-attr, operator]
    least = ((experts + dense - embedding) // 2 + embedding) // 2
    for rank in _measured(job, "deep"):
        for what, times in (("parameters", 1), ("gradients", 1), ("state", 2)):
            found = rank[False][what] + rank[True][what]
            assert times * least <= found <= times * (least + 40 * 16)


@pytest.mark.parametrize("zero", LEVELS)
def test_law_2_replicas_stay_bit_equal(zero: int) -> None:
    """In float32, where every other order of additions would show."""
    strategy = parallel(pp=2, dp=4, ep=2, zero=zero, microbatches=2)
    job = _single("deep").apply(strategy).lower(optimizer=ADAMW)
    for seed in range(2):
        with job.launch("loopback", adversary=True, seed=seed) as run:
            assert run.differing_replicas() == []
            before = run.parameters()
            for batch in batches_of("deep"):
                run.step(batch)
            assert run.differing_replicas() == []
            after = run.parameters()
        assert before.keys() == after.keys()
        assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("levels", "microbatches"), [((0, 1), 4), ((2, 3), 4), ((0, 1, 2, 3), 1)], ids=str
)
def test_law_1_float32_levels_are_bit_equal_where_they_add_alike(
    levels: tuple[int, ...], microbatches: int
) -> None:
    """Levels 0 and 1 add over microbatches first, 2 and 3 over ranks; of one microbatch all agree."""
    found = []
    for zero in levels:
        strategy = parallel(dp=2, zero=zero, microbatches=microbatches, bucket_size=300)
        job = _single("dense").apply(strategy).lower(optimizer=ADAMW)
        with job.launch("loopback", adversary=True) as run:
            found.append(train(run, batches_of("dense")))
    first, *others = found
    for other in others:
        assert first.losses == other.losses
        for mine, theirs in zip(first.gradients, other.gradients, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(torch.equal(p, other.parameters[n]) for n, p in first.parameters.items())
