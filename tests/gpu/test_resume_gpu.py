"""Checkpoints of NCCL ranks: all of it comes back bit for bit, under other strategies and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.strategies import parallel
from tests.gpu.conftest import GetPool
from tests.resuming import losses_across_a_stop, same, state_of
from tests.zoo import CASES, Plain

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]

PIECES, HALF = 8, 5
CASE = CASES["deep_moe"]
ZERO3, EXPERTS = {"dp": 4, "zero": 3}, {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zbv"}
PAIRS = [  # strategy and device before, and after
    (ZERO3, "cuda", EXPERTS, "cuda"),
    (EXPERTS, "cuda", {}, "cuda"),
    (EXPERTS, "cuda", {}, "cpu"),
    ({}, "cpu", ZERO3, "cuda"),
]


def _job(degrees: dict[str, Any], device: str, precision: str | None = None) -> Job:
    def make() -> torch.nn.Module:
        made = Plain(num_stages=4)
        return made if precision else made.double()

    batch = CASE.batch(0)
    strategy = parallel(microbatches=PIECES // degrees.get("dp", 1), **degrees)
    program = piper.trace(make, batch, CASE.step).apply(strategy)
    return program.lower(
        optimizer=piper.adamw(lr=1e-2), clip=0.5, device=device, precision=precision
    )


def _launcher(job: Job, pool: GetPool) -> Any:
    return "single" if job.plan.mesh.size == 1 else pool(job.plan.mesh.size)


@pytest.mark.parametrize(("before", "there", "after", "here"), PAIRS)
def test_a_stop_does_not_show(
    tmp_path: Path, pool: GetPool, before: Any, there: str, after: Any, here: str
) -> None:
    with _job({}, "cpu").launch("single") as run:
        wanted = [run.step(CASE.batch(seed)).loss for seed in range(2 * HALF)]
    old, new = _job(before, there), _job(after, here)
    losses = losses_across_a_stop(
        (old, _launcher(old, pool)),
        (new, _launcher(new, pool)),
        [CASE.batch(seed) for seed in range(2 * HALF)],
        tmp_path / "saved",
    )
    assert losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_steps_after_a_save_do_not_reach_it(
    tmp_path: Path, pool: GetPool, precision: str | None
) -> None:
    """Copies to the host are behind the steps before them and before the ones that come."""
    job = _job(EXPERTS, "cuda", precision)
    with job.launch(pool(4)) as run:
        for seed in range(3):
            run.step(CASE.batch(seed))
        kept = state_of(run)
        saves = []
        for number in range(3):
            saves.append(run.save(tmp_path / str(number), wait=False))
            run.step(CASE.batch(3 + number))
            while not saves[-1].done():
                pass
        moved = state_of(run)
    assert not same(moved, kept)
    with job.resume(tmp_path / "0", pool(4)) as run:
        assert same(state_of(run), kept)
        for seed in range(3, 6):
            run.step(CASE.batch(seed))
        again = state_of(run)
    if precision is None:  # atomic additions of a card may come in another order
        assert all(torch.allclose(again[name], moved[name], rtol=1e-9) for name in moved)
