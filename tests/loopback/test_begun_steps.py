"""Steps that begin before the result of the one before is asked for: the same training, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.api.job import Job
from piper.errors import RunError
from piper.runtime.launch.pool_run import PoolRun
from piper.runtime.worker.ended_step import StepResults
from piper.strategies import parallel
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("skip")


def _job(**more: Any) -> Job:
    strategy = parallel(pp=2, dp=2, zero=2, microbatches=2)
    return program_of("dropout").apply(strategy).lower(optimizer=ADAMW, **more)


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
def test_they_train_as_if_each_was_waited_for(adversary: bool, tmp_path: Path) -> None:
    """Whatever else is asked of the run comes behind all that have begun."""
    job, batches = _job(clip=0.1), batches_of("dropout")
    with job.launch("loopback", adversary=adversary) as run:
        wanted = [run.step(batch) for batch in batches]
        wanted_bits = _bits(run.state_dict())
    with job.launch("loopback", adversary=adversary) as run:
        begun = [run.begin(batch) for batch in batches]
        assert [each.over for each in begun] == [True] * (len(begun) - 2) + [False] * 2
        assert run.steps == len(batches)
        assert _bits(run.state_dict()) == wanted_bits
        assert all(each.over for each in begun)
        assert [each.result() for each in begun] == wanted
        assert not (last := run.begin(batches[0])).over
        assert run.optimizer_state() and last.over
        last = run.begin(batches[0])
        saved = run.save(tmp_path / "saved")
        assert last.over and saved.steps == len(batches) + 2
        run.begin(batches[1])
        assert run.step(batches[2]).loss < wanted[0].loss


def test_a_result_waits_for_those_before() -> None:
    batches = batches_of("dropout")
    with _job().launch("loopback") as run:
        first, second = (run.begin(batch) for batch in batches[:2])
        assert repr(second) == "<StepUnderWay, going on>"
        assert second.result() is second.result() and first.over
        assert repr(first) == "<StepUnderWay, over>"


def test_options_and_shapes_of_batches_are_those_of_their_step() -> None:
    job, batches = _job(), batches_of("dropout")
    with job.launch("loopback") as run:
        run.set_options({"lr": 0.5})
        run.step(batches[0])
        run.set_options({"lr": 1e-4})
        run.step(batches[1])
        wanted = _bits(run.parameters())
    with job.launch("loopback") as run:
        run.set_options({"lr": 0.5})
        run.begin(batches[0])
        run.set_options({"lr": 1e-4})
        run.begin(batches[1])
        assert _bits(run.parameters()) == wanted


def test_recorded_steps_are_waited_for() -> None:
    batches = batches_of("dropout")
    with _job().launch("loopback") as run:
        before = run.begin(batches[0])
        recording = run.record(2)
        assert before.over
        recorded = [run.begin(batch) for batch in batches[:2]]
        assert all(each.over for each in recorded) and recording.timeline.steps
        assert not run.begin(batches[0]).over


def _counted() -> tuple[Job, dict[str, torch.Tensor]]:
    def step(model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) * batch["w"]).sum(), batch["w"].sum()

    good = {"x": torch.ones(4, 3), "w": torch.ones(4, 1)}
    program = piper.trace(lambda: nn.Linear(3, 1), good, step)
    return program.apply(parallel(dp=2, microbatches=2)).lower(optimizer=ADAMW), good


def test_a_step_that_cannot_begin_leaves_those_before_alone() -> None:
    job, good = _counted()
    bad = {**good, "w": good["w"] * 0}
    with job.launch("loopback") as run:
        begun = run.begin(good)
        with pytest.raises(RunError, match="the total count of the batch is 0"):
            run.begin(bad)
        assert begun.result().count == 4.0 and run.steps == 1
        assert run.step(good).count == 4.0


def _first_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a device fails behind its host's back."""

    def get(self: StepResults) -> dict[str, Any]:
        if self.number == 1:
            raise RunError("lost")
        return own(self)

    own = StepResults.get
    monkeypatch.setattr(StepResults, "get", get)


def test_what_a_step_fails_with_is_raised_once_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the step itself, and by those behind it."""
    _first_is_lost(monkeypatch)
    job, good = _counted()
    with job.launch("loopback") as run:
        begun = [run.begin(good), run.begin(good)]
        for each in (*begun, *begun):
            with pytest.raises(RunError, match="lost"):
                each.result()
        assert run.begin(good).result().loss > run.step(good).loss  # its own, not the second's


def test_ranks_that_disagree_about_a_step_do_not_shift_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, good = _counted()
    with job.launch("loopback") as run:
        wanted = [run.step(good).loss for _ in range(3)]
    own = PoolRun.finish

    def finish(self: PoolRun) -> list[dict[str, Any]]:
        found = own(self)
        if not told:
            told.append(found[0])
            found[0] = {**found[0], "loss": 7.0}
        return found

    told: list[Any] = []
    monkeypatch.setattr(PoolRun, "finish", finish)
    with job.launch("loopback") as run:
        begun = [run.begin(good), run.begin(good)]
        with pytest.raises(RunError, match="ranks disagree about the loss"):
            begun[1].result()
        assert begun[1].result().loss == wanted[1] and run.step(good).loss == wanted[2]


def test_or_by_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _first_is_lost(monkeypatch)
    job, good = _counted()
    with job.launch("loopback") as run:
        run.begin(good)
        with pytest.raises(RunError, match="lost"):
            run.parameters()


def test_or_at_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _first_is_lost(monkeypatch)
    job, good = _counted()
    with pytest.raises(RunError, match="lost"), job.launch("loopback") as run:
        run.begin(good)
    assert run.closed


def test_a_closed_run_has_no_results_any_more() -> None:
    job, good = _counted()
    run = job.launch("loopback")
    begun = run.begin(good)
    run.close()
    with pytest.raises(RunError, match="the run is closed"):
        begun.result()
