"""Cut tensors through the life of a training: evaluation, averages, narrow dtypes, files, shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.strategies import parallel
from tests.tensor_zoo import CASES, batches_of, program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")

WAYS: list[dict[str, Any]] = [
    {"tp": 2, "sp": True, "microbatches": 2},
    {"tp": 2, "dp": 2, "zero": 3},
    {"cp": 2, "tp": 2, "microbatches": 2},
]

OF_EXPERTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2, "ep": 2},
    {"tp": 2, "sp": True, "dp": 2, "ep": 2, "zero": 3},
    {"tp": 4, "microbatches": 2},
]


def _job(name: str, degrees: dict[str, Any], **more: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW, **more)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [*(("dropout", way) for way in WAYS), *(("mixture", way) for way in OF_EXPERTS[:2])],
    ids=str,
)
def test_evaluation_and_averages_are_those_of_one_device(
    name: str, degrees: dict[str, Any]
) -> None:
    found = []
    first, second, _ = batches_of(name)
    for way in (degrees, {"microbatches": 2}):
        with _job(name, way, ema=0.9).launch("loopback") as run:
            run.step(first)
            losses = [run.evaluate(second, ema=ema).loss for ema in (False, True)]
            found.append((losses, run.ema()))
    (mine, averages), (own, others) = found
    assert mine == pytest.approx(own, rel=1e-12)
    for name, average in others.items():
        torch.testing.assert_close(averages[name], average, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "ways"), [("tied", WAYS), ("mixture", OF_EXPERTS)])
def test_training_goes_on_under_other_cuts(
    name: str, ways: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Saved under one strategy and resumed under the next, as if it had never stopped."""
    batches = [CASES[name].batch(seed) for seed in range(6)]
    with _job(name, {"microbatches": 2}).launch("loopback") as run:
        wanted = [run.step(batch).loss for batch in batches]
    found = []
    for number, degrees in enumerate(ways):
        job = _job(name, degrees)
        resumed = number and job.resume(tmp_path / "saved", "loopback")
        with resumed or job.launch("loopback") as run:
            found += [run.step(batch).loss for batch in batches[2 * number : 2 * number + 2]]
            run.save(tmp_path / "saved")
    assert found == pytest.approx(wanted, rel=1e-9)


def test_weights_go_out_and_come_in_whole(tmp_path: Path) -> None:
    with _job("tied", {"tp": 2, "sp": True, "dp": 2, "zero": 1}).launch("loopback") as run:
        run.step(batches_of("tied")[0])
        run.save_weights(tmp_path / "weights")
        wanted = run.parameters()
    assert {n: tuple(p.shape) for n, p in wanted.items()} == {
        n: tuple(p.shape) for n, p in CASES["tied"].model().named_parameters()
    }
    with _job("tied", {"tp": 4}, weights=tmp_path / "weights").launch("loopback") as run:
        found = run.parameters()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("name", "degrees"), [*(("dense", way) for way in WAYS), ("experts", OF_EXPERTS[0])], ids=str
)
def test_bfloat16_learns_as_one_device_does(name: str, degrees: dict[str, Any]) -> None:
    case = CASES[name]
    program = piper.trace(case.make_model, case.batch(0), case.step)
    curves = []
    for way in (degrees, {"microbatches": 2}):
        job = program.apply(parallel(**way)).lower(optimizer=ADAMW, precision="bf16")
        with job.launch("loopback") as run:
            curves.append([run.step(batch).loss for batch in batches_of(name)])
    assert curves[0] == pytest.approx(curves[1], abs=2e-3)
    assert curves[1][-1] < curves[1][0]


def test_batches_of_other_shapes() -> None:
    (batch, *_), losses = batches_of("dense"), []
    short = {name: leaf[:8, :4] for name, leaf in batch.items()}
    for degrees in ({"tp": 2, "sp": True, "dp": 2}, {"dp": 2}):
        with _job("dense", degrees).launch("loopback") as run:
            losses.append([run.step(each).loss for each in (batch, short, batch)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_saved_job_trains_alike(tmp_path: Path) -> None:
    job = _job("dropout", {"tp": 2, "sp": True})
    job.save(tmp_path / "job.json")
    losses = []
    for each in (job, piper.load_job(tmp_path / "job.json")):
        with each.launch("loopback") as run:
            losses.append([run.step(batch).loss for batch in batches_of("dropout")])
    assert losses[0] == losses[1]


def test_what_is_foreseen_is_what_the_plan_has() -> None:
    program = program_of("dense").apply(parallel(tp=2, sp=True, pp=2, microbatches=2))
    job = program.lower(optimizer=ADAMW)
    planned: dict[str, int] = {}
    for part in job.plan.classes:
        for task in part.tasks:
            if getattr(task, "comm", None):
                planned[task.kind] = planned.get(task.kind, 0) + 1
    foreseen: dict[str, int] = {}
    for item in program.foreseen():
        for kind, number in item.comms:
            foreseen[kind] = foreseen.get(kind, 0) + number
    assert foreseen == planned
    assert "reduce_scatter of activations over tp at pp=0 on stream tensor: 3 in each" in (
        program.preview()
    )
