"""Moving averages of weights: those of torch's AveragedModel, wherever parameters lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import piper
from piper.api.job import Job
from piper.errors import PlanError, RunError
from piper.runtime.worker.update import Updater
from piper.strategies import parallel
from tests.loopback.plain_loop import PlainLoop
from tests.zoo import CASES, batches_of, program_of

CASE, EMA = "tied", 0.6
DEGREES: dict[str, dict[str, Any]] = {
    "one": {},
    "zero 0": {"dp": 2, "zero": 0},
    "zero 1": {"dp": 2, "zero": 1},
    "buckets": {"pp": 2, "dp": 2, "zero": 3, "bucket_size": "1KiB"},
    "ep2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "two directions": {"pp": 2, "schedule": "dualpipev"},
}
LOWERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "late clip": {"clip": 0.05, "late_clip": True},
}


def partly(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; the embedding is not trained."""
    matrices = [p for p in model.parameters() if p.ndim >= 2 and len(p) != 11]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 0.1}], lr=1e-2)


def _job(degrees: str, **lowered: Any) -> Job:
    case = "deep" if degrees == "two directions" else CASE
    options = DEGREES[degrees]
    program = program_of(case).apply(parallel(microbatches=8 // options.get("dp", 1), **options))
    return program.lower(**{"optimizer": piper.adamw(lr=1e-2), "ema": EMA, **lowered})


def _averaged(job: Job, case: str) -> dict[str, torch.Tensor]:
    plain = PlainLoop(job, CASES[case])
    averaged = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    plain.train(batches_of(case), after=lambda: averaged.update_parameters(plain.model))
    return {name: param.detach() for name, param in averaged.module.named_parameters()}


@pytest.mark.parametrize("degrees", DEGREES)
def test_evaluation_on_averages(degrees: str) -> None:
    """It is that of one device's AveragedModel, and leaves no trace in what is trained."""
    case = "deep" if degrees == "two directions" else CASE
    job, batches = _job(degrees), batches_of(case)
    plain = PlainLoop(job, CASES[case])
    averaged = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    plain.train(batches, after=lambda: averaged.update_parameters(plain.model))
    pieces = range(plain.pieces)
    rows = [{key: leaf.chunk(len(pieces))[i] for key, leaf in batches[0].items()} for i in pieces]
    with torch.no_grad():
        model = averaged.module.eval()
        wanted = sum(float(CASES[case].step(model, piece)) for piece in rows) / len(rows)
    with job.launch("loopback", adversary=True) as run, job.launch("loopback") as other:
        for batch in batches:
            run.step(batch)
            other.step(batch)
            found = run.evaluate(batches[0], ema=True).loss
        assert found == pytest.approx(wanted, rel=1e-10)
        assert run.evaluate(batches[0]).loss != pytest.approx(wanted, rel=1e-6)
        with pytest.raises(RunError):  # nor does one that is refused
            run.evaluate({}, ema=True)
        for name, value in other.parameters().items():
            assert torch.equal(run.parameters()[name], value)
        assert run.differing_replicas() == []


def _errors(job: Job, case: str) -> dict[str, float]:
    """Per parameter, how far its average is from that of one device, in relation to its norm."""
    wanted = _averaged(job, case)
    with job.launch("loopback", adversary=True) as run:
        for batch in batches_of(case):
            run.step(batch)
        found = run.ema()
    assert found.keys() == wanted.keys()
    return {n: float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}


@pytest.mark.parametrize("how", LOWERED)
@pytest.mark.parametrize("degrees", DEGREES)
def test_averages_are_those_of_one_device(degrees: str, how: str) -> None:
    case = "deep" if degrees == "two directions" else CASE
    errors = _errors(_job(degrees, **LOWERED[how]), case)
    assert max(errors.values()) < 1e-8, errors


@pytest.mark.filterwarnings("ignore:.*leaves out")
@pytest.mark.parametrize("degrees", ["zero 0", "buckets"])
def test_averages_of_groups_and_of_what_is_not_trained(degrees: str) -> None:
    job = _job(degrees, optimizer=partly)
    errors = _errors(job, CASE)
    assert max(errors.values()) < 1e-8, errors
    assert errors["embed.weight"] == 0.0


def _never(self: Updater) -> None:
    pass


def _without_a_first_copy(self: Updater) -> None:
    torch._foreach_lerp_(self.averages, self.masters, 1 - EMA)


@pytest.mark.parametrize("mutant", [_never, _without_a_first_copy])
def test_wrong_averages_are_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Updater, "average", mutant)
    assert max(_errors(_job("buckets"), CASE).values()) > 1e-6


def test_averages_of_narrow_parameters_are_wide() -> None:
    job = _job("zero 1", precision="bf16")
    with job.launch("loopback") as run:
        assert run.ema().keys() == run.parameters().keys()
        for name, average in run.ema().items():  # before the first step, what training starts from
            assert torch.equal(average, run.masters()[name])
        run.step(batches_of(CASE)[0])
        one = run.masters()
        run.step(batches_of(CASE)[0])
        for name, average in run.ema().items():
            wanted = torch.lerp(one[name], run.masters()[name], 1 - EMA)
            assert average.dtype == torch.float32 and torch.equal(average, wanted)


@pytest.mark.parametrize("degrees", ["zero 0", "buckets"])
def test_the_plan_counts_the_bytes_of_averages(degrees: str) -> None:
    held, said = [], []
    for ema in (None, EMA):
        job = _job(degrees, ema=ema)
        with job.launch("loopback") as run:
            run.step(batches_of(CASE)[0])
            held.append(max(memory["optimizer"] for memory in run.memory()))
        said.append(max(peak.kept["optimizer"] for peak in job.report.peaks))
    assert held[1] - held[0] == said[1] - said[0] > 0


def test_a_saved_plan_keeps_its_averages(tmp_path: Path) -> None:
    job = _job("zero 1")
    job.save(tmp_path / "plan.json")
    loaded = piper.load_job(tmp_path / "plan.json")
    assert loaded.plan.ema == EMA
    with loaded.launch("loopback") as one, job.launch("loopback") as two:
        for batch in batches_of(CASE):
            one.step(batch)
            two.step(batch)
        for name, average in one.ema().items():
            assert torch.equal(average, two.ema()[name])


def test_averages_that_make_no_sense() -> None:
    for ema in (1.0, -0.1, "0.9"):
        with pytest.raises(PlanError, match="ema="):
            _job("one", ema=ema)
    with (
        _job("one", ema=None).launch("single") as run,
        pytest.raises(RunError, match="keeps no moving averages"),
    ):
        run.ema()
    with (
        _job("one", ema=None).launch("single") as run,
        pytest.raises(RunError, match="keeps no moving averages"),
    ):
        run.evaluate(batches_of(CASE)[0], ema=True)
