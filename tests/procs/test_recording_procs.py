"""Recorded steps of processes: every task has its span, by one clock of all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piper.cli.main import main
from piper.observe.timeline import Timeline
from piper.observe.timeline_files import load_timeline
from tests.procs.conftest import GetPool
from tests.recorded import check_measured
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("procs")
HOME = Path(__file__).parents[2]
FILE = str(Path(__file__).with_name("tiny.py"))
CASES = [
    ("dense", "pp2", "1f1b", {}),
    ("dense", "dp2", "none", {"zero": 3, "bucket_size": "1KiB"}),
    ("moe", "ep2", "none", {"zero": 2}),
]


@pytest.mark.parametrize(("name", "degrees", "schedule", "more"), CASES)
def test_every_task_has_a_span(
    pool: GetPool, name: str, degrees: str, schedule: str, more: dict[str, object]
) -> None:
    strategy = strategy_of(degrees, schedule, **more)
    job, batches = program_of(name).apply(strategy).lower(optimizer=ADAMW), batches_of(name)
    with job.launch(pool(2)) as run:
        run.step(batches[0])
        recording = run.record(steps=2)
        losses = [run.step(batch).loss for batch in batches[1:3]]
        run.step(batches[0])
    with job.launch(pool(2)) as run:
        assert [run.step(batch).loss for batch in batches[:3]][1:] == losses
    timeline = recording.timeline
    check_measured(timeline, job.plan, steps=2)
    assert 0 < timeline.clock_error < 1e-4  # one machine has one clock
    kinds = {label.kind for track in timeline.tracks for label in track.labels}
    assert ("read" in kinds) == (degrees == "ep2")


def _torchrun(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", *arguments],
        cwd=HOME,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_clocks_of_two_machines_and_messages_that_are_seen() -> None:
    out = _torchrun("tests.procs.clocks_torchrun")
    for line in ("rank 0 tie", "rank 1 tie", "rank 0 same", "rank 1 same", "rank 1 message"):
        assert f"{line}: True" in out, out


def _check(timeline: Timeline, steps: int) -> None:
    assert len(timeline.steps) == steps
    assert [track.ranks for track in timeline.tracks] == [(0,), (1,)]
    for track in timeline.tracks:
        assert list(track.which) == list(range(len(track.labels))) * steps
    assert any("replicate" in line for line in timeline.directives)


def test_the_command_line_writes_a_file_on_processes_and_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", FILE, "--dp", "2", "--microbatches", "2", "--steps", "4"]
    recorded = ["--record-steps", "2:4", "--record"]
    local, other = str(tmp_path / "local.json"), str(tmp_path / "other.timeline")
    assert main([*arguments, "--launch", "local", *recorded, local]) == 0
    _torchrun("piper", *arguments, "--launch", "torchrun", *recorded, other)
    for path in (local, other):
        _check(load_timeline(path), 2)
    assert load_timeline(local).tracks[0].labels == load_timeline(other).tracks[0].labels
    capsys.readouterr()
    asked = ["--what-if", "F=0", "--memory", "--path", "--json"]
    for path in (local, other):  # each has its plan with it
        assert main(["explain", path, *asked]) == 0
        facts = json.loads(capsys.readouterr().out)
        (found,) = facts["what_if"]
        took = load_timeline(
            path
        ).step_seconds  # how near replays are, what else goes on here decides
        assert min(took) <= found["recorded"] <= max(took)
        assert found["changed"] < found["seconds"] and found["tasks"] > 0
        assert facts["path"][0]["begin"] == facts["begin"] and facts["memory"]["nbytes"] > 0
    assert main(["diff", local, other, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["same_plan"]
