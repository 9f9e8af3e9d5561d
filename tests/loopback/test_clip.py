"""Clipping and early Updates: torch's norm and torch's training, whatever is cut and however late."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from piper.api.job import Job
from piper.strategies import parallel
from piper.training.verify import Trained, compare, train_one_device
from tests.zoo import ADAMW, CASES, program_of

pytestmark = pytest.mark.xdist_group("clip")  # its jobs are made once

STEPS = 5
ONE: dict[str, Any] = {}
MIXED = {"pp": 2, "dp": 4, "ep": 2}
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("moe", ONE),
    *(("tied", {"pp": 2, "dp": 2, "zero": zero, "bucket_size": 700}) for zero in range(4)),
    *(("counted", {**MIXED, "zero": zero}) for zero in range(4)),
    ("deep", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zbv"}),
    ("deep", {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "schedule": "dualpipev"}),
    ("deep", {"pp": 2, "schedule": "dualpipe"}),
]


def _batches(name: str) -> list[Any]:
    return [CASES[name].batch(seed) for seed in range(STEPS)]


def _job(name: str, options: dict[str, Any], **lowering: Any) -> Job:
    options = {"microbatches": 8 // options.get("dp", 1), **options}
    return program_of(name).apply(parallel(**options)).lower(optimizer=ADAMW, **lowering)


@cache
def _reference(name: str, clip: float) -> tuple[Trained, tuple[float, ...]]:
    """Training on one device, and what `clip_grad_norm_` returned in each step."""
    norms: list[float] = []
    torch_clip = torch.nn.utils.clip_grad_norm_

    def recording(*args: Any) -> torch.Tensor:
        norm = torch_clip(*args)
        norms.append(float(norm))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", recording)
        trained = train_one_device(_job(name, ONE, clip=clip), _batches(name))
    return trained, tuple(norms)


@cache
def _binding(name: str) -> float:
    """A largest norm that binds in some steps, and not in others."""
    norms = sorted(_reference(name, 1e9)[1])
    clip = (norms[STEPS // 2] + norms[STEPS // 2 - 1]) / 2
    binds = [norm > clip for norm in _reference(name, clip)[1]]
    assert any(binds) and not all(binds)
    return clip


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
@pytest.mark.parametrize(("name", "options"), JOBS, ids=str)
def test_clips_like_torch(name: str, options: dict[str, Any], late: bool) -> None:
    clip = _binding(name)
    trained, norms = _reference(name, clip)
    job = _job(name, options, clip=clip, late_clip=late)
    with job.launch("loopback", adversary=True, seed=2) as run:
        errors = compare(run, _batches(name), trained)
        assert errors.exact, errors
    with job.launch("loopback") as run:
        found = [run.step(batch).norm for batch in _batches(name)]
    assert found == pytest.approx(norms, rel=1e-10)


def test_a_norm_that_counts_copies_twice_would_be_seen() -> None:
    """The clip of one is not the training of the other: parity above can fail."""
    clip = _binding("tied")
    trained, _ = _reference("tied", clip)
    with _job("tied", ONE, clip=clip * 0.99).launch("loopback") as run:
        assert not compare(run, _batches("tied"), trained).exact


PIPELINES = [("zb_h1", {"bucket_size": 700}), ("zbv", {})]


@pytest.mark.parametrize(("schedule", "more"), PIPELINES, ids=["zb_h1", "zbv"])
@pytest.mark.parametrize("zero", [0, 1])
def test_updates_start_before_the_last_chunk(schedule: str, more: Any, zero: int) -> None:
    """A bucket whose gradient is complete is updated while other chunks still run."""
    options = {"pp": 2, "dp": 2, "schedule": schedule, "zero": zero, **more}
    for lowering in ({}, {"clip": 1.0, "late_clip": True}):
        for part in _job("deep", options, **lowering).plan.classes:
            kinds = [task.kind for task in part.tasks]
            last_run = len(kinds) - 1 - kinds[::-1].index("run")
            assert "update" in kinds[:last_run], part.slice


@pytest.mark.parametrize(("schedule", "more"), PIPELINES, ids=["zb_h1", "zbv"])
def test_updates_that_clip_wait_for_the_norm(schedule: str, more: Any) -> None:
    options = {"pp": 2, "dp": 2, "schedule": schedule, **more}
    for part in _job("deep", options, clip=1.0).plan.classes:
        names = [task.name for task in part.tasks]
        norm = next(i for i, name in enumerate(names) if name.startswith("total.norm"))
        updates = [i for i, task in enumerate(part.tasks) if task.kind == "update"]
        assert len(updates) > 1 and min(updates) > norm
        assert all(part.tasks[norm].writes[0] in part.tasks[i].reads for i in updates)
    for part in _job("deep", options, clip=1.0, late_clip=True).plan.classes:
        names = [task.name for task in part.tasks]
        norm = next(i for i, name in enumerate(names) if name.startswith("total.norm"))
        settles = [i for i, task in enumerate(part.tasks) if task.kind == "settle"]
        updates = [i for i, task in enumerate(part.tasks) if task.kind == "update"]
        assert len(settles) == len(updates) and min(settles) > norm > min(updates)
