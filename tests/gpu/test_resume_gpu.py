"""Checkpoints of NCCL ranks: all of it comes back bit for bit, under other strategies and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.strategies import parallel
from tests.gpu.conftest import GetPool
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


def _state(run: Run) -> dict[str, torch.Tensor]:
    kept = {f"{n}:{k}": t for n, pieces in run.optimizer_state().items() for k, t in pieces.items()}
    return {name: tensor.cpu() for name, tensor in {**run.masters(), **kept}.items()}


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize(("before", "there", "after", "here"), PAIRS)
def test_a_stop_does_not_show(
    tmp_path: Path, pool: GetPool, before: Any, there: str, after: Any, here: str
) -> None:
    with _job({}, "cpu").launch("single") as run:
        wanted = [run.step(CASE.batch(seed)).loss for seed in range(2 * HALF)]
    job = _job(before, there)
    with job.launch(_launcher(job, pool)) as run:
        losses = [run.step(CASE.batch(seed)).loss for seed in range(HALF)]
        run.save(tmp_path / "saved")
        kept = _state(run)
    job = _job(after, here)
    with job.resume(tmp_path / "saved", _launcher(job, pool)) as run:
        assert _same(_state(run), kept)
        losses += [run.step(CASE.batch(seed)).loss for seed in range(HALF, 2 * HALF)]
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
        kept = _state(run)
        saves = []
        for number in range(3):
            saves.append(run.save(tmp_path / str(number), wait=False))
            run.step(CASE.batch(3 + number))
            while not saves[-1].done():
                pass
        moved = _state(run)
    assert not _same(moved, kept)
    with job.resume(tmp_path / "0", pool(4)) as run:
        assert _same(_state(run), kept)
        for seed in range(3, 6):
            run.step(CASE.batch(seed))
        again = _state(run)
    if precision is None:  # atomic additions of a card may come in another order
        assert all(torch.allclose(again[name], moved[name], rtol=1e-9) for name in moved)
