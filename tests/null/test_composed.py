"""Directives that `parallel` issued know what it was given: saved, applied again, and in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import moe

import piper
from piper.api.job import load_job
from piper.cli.main import main
from piper.ir.history import ranks_text
from piper.mesh import Mesh
from piper.plan.report.explain import explain
from piper.schedules import schedule
from piper.strategies import parallel
from piper.view.directive_rows import directive_rows
from piper.view.strategy_line import strategy_line


def test_programs_keep_what_was_given(tmp_path: Path) -> None:
    program = piper.trace(moe.model, moe.batch(), moe.step)
    found = program.apply(parallel(dp=2, ep=2, zero=1))
    assert {str(record.composed) for record in found.history} == {"parallel(dp=2, ep=2, zero=1)"}
    assert program.apply(found.history).history == found.history
    found.save(tmp_path / "program.json")
    assert piper.load_program(tmp_path / "program.json").history == found.history
    assert {r.composed for r in program.apply(lambda s: s.mesh(dp=1)).history} == {None}


def test_objects_are_named() -> None:
    table = schedule("1f1b", num_ranks=2, num_microbatches=2)
    program = piper.trace(moe.model, moe.batch(), moe.step)
    history = program.apply(parallel(pp=2, schedule=table, microbatches=2)).history
    assert str(history[0].composed) == "parallel(pp=2, schedule='1f1b', microbatches=2)"


def test_options_of_a_command_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No line of the user's issued these directives."""
    out = str(tmp_path / "plan.json")
    assert main(["plan", moe.__file__, "--dp", "2", "--ep", "2", "--out", out]) == 0
    plan = load_job(out).plan
    assert {row.source for row in directive_rows(plan)} == {"parallel(dp=2, ep=2)"}
    origins = {task.origin: task.name for part in plan.classes for task in part.tasks}
    shard = next(i for i, r in enumerate(plan.history) if r.directive.kind == "shard")
    assert "(parallel(dp=2, ep=2); it changes" in explain(plan, origins[shard])


def test_degrees_are_those_that_were_given() -> None:
    """Experts have axes of their own in the mesh, so that data ranks are not those of its dp."""
    program = piper.trace(moe.model, moe.batch(), moe.step)
    found = program.apply(parallel(dp=2, ep=2, zero=1))
    assert str(found.graph.mesh) == "pp=1 dp=1 ep=2"
    assert ranks_text(found.history, found.graph.mesh) == "2 ranks (dp=2 ep=2)"
    job = found.lower()
    assert strategy_line(job.plan) == "dp 2, ep 2 · ZeRO-1"
    assert "mesh pp=1 dp=1 ep=2, 2 ranks, 2 data ranks (dp=1 x ep=2) x 1 micro" in job.summary()
    alone = program.apply(parallel(dp=2)).lower().summary()
    assert "mesh pp=1 dp=2 ep=1, 2 ranks, 2 data ranks x 1 micro" in alone
    assert ranks_text((), found.graph.mesh) == "2 ranks (pp=1 dp=1 ep=2)"
    assert ranks_text((), Mesh()) == "1 rank"


def test_other_ranks_than_the_degrees_have(capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ["--dp", "2", "--ep", "2", "--steps", "1"]
    assert main(["train", moe.__file__, *degrees, "--nproc", "3"]) == 2
    assert "--nproc 3, but the strategy has 2 ranks (dp=2 ep=2)" in capsys.readouterr().err


def test_other_ranks_than_torchrun_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piper.cli.train_command._wanted_ranks", lambda arguments: 3)
    assert main(["train", moe.__file__, "--dp", "2", "--ep", "2", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "torchrun started 3 ranks, but the strategy has 2 ranks (dp=2 ep=2)" in said


def test_zero_over_one_rank_is_said() -> None:
    """Sweeps come down to one rank, and ranks of experts are none of their data ranks."""
    program = piper.trace(moe.model, moe.batch(), moe.step)
    alone = program.apply(parallel(dp=1, zero=3)).lower().summary()
    assert "zero=3): ZeRO cuts nothing, since dp=1 ep=1 is one rank" in alone
    experts = program.apply(parallel(dp=2, ep=2, zero=2)).lower().summary()
    assert "EP='*'), over='dp', zero=2): ZeRO cuts nothing, since dp=1 is one rank" in experts
    assert experts.count("cuts nothing") == 1
    assert "cuts nothing" not in program.apply(parallel(dp=2, zero=2)).lower().summary()
