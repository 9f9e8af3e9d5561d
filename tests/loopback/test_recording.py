"""Recorded steps: every task has its span, nothing else changes, and nothing stays behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import piper
from piper.errors import PiperError, RankLost
from piper.observe.timeline_files import is_timeline, load_timeline
from tests.recorded import check_measured
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of

CASES = [
    ("moe", "pp2", "1f1b", {}),
    ("moe", "ep2", "none", {"zero": 3}),
    ("deep", "pp2_ep2", "dualpipev", {"zero": 2}),
]


def _job(name: str, degrees: str, schedule: str, **more: int) -> piper.Job:
    return program_of(name).apply(strategy_of(degrees, schedule, **more)).lower(optimizer=ADAMW)


@pytest.mark.parametrize(("name", "degrees", "schedule", "more"), CASES)
@pytest.mark.parametrize("adversary", [False, True])
def test_every_task_has_a_span(
    name: str, degrees: str, schedule: str, more: dict[str, int], adversary: bool
) -> None:
    job, batches = _job(name, degrees, schedule, **more), batches_of(name)
    with job.launch("loopback", adversary=adversary) as run, job.launch("loopback") as other:
        run.step(batches[0])
        recording = run.record(steps=2)
        losses = [run.step(batch).loss for batch in batches[1:3]]
        assert [other.step(batch).loss for batch in batches[:3]][1:] == losses
    check_measured(recording.timeline, job.plan, steps=2)


def test_one_rank_and_nothing_stays_behind() -> None:
    job, batches = _job("moe", "one", "none"), batches_of("moe")
    with job.launch("single") as run, job.launch("single") as other:
        (worker,) = run.workers.workers
        before = worker.starts, worker.order, worker.transport
        table, functions = worker.order.table, list(worker.starts)
        with run.record() as recording:
            assert worker.starts is before[0]  # nothing is wrapped before a step comes
            losses = [run.step(batch).loss for batch in batches[:2]]
            assert worker.starts is not before[0]
            assert not set(map(id, functions)) & set(map(id, worker.starts))
            with pytest.raises(PiperError, match="2 steps are recorded so far"):
                _ = recording.timeline
        assert (worker.starts, worker.order, worker.transport) == before
        assert worker.starts is before[0]
        assert worker.order.table is table
        assert all(mine is own for mine, own in zip(worker.starts, functions, strict=True))
        assert [other.step(batch).loss for batch in batches[:2]] == losses
        mine, theirs = run.parameters(), other.parameters()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
        check_measured(recording.timeline, job.plan, steps=2)
        run.step(batches[0])
        assert len(recording.timeline.steps) == 2


def test_a_step_that_fails_ends_the_recording() -> None:
    job, batches = _job("moe", "one", "none"), batches_of("moe")
    with job.launch("single") as run:
        (worker,) = run.workers.workers
        own = worker.starts
        recording = run.record(steps=2)
        run.step(batches[0])

        def fail() -> None:
            raise ValueError("planted")

        worker.order.table[5] = (5, fail, *worker.order.table[5][2:])
        with pytest.raises(ValueError, match="planted"):
            run.step(batches[1])
        assert worker.starts is own
        with pytest.raises(PiperError, match="no step was recorded to its end"):
            _ = recording.timeline
        with run.record() as again:
            run.step(batches[2])
        check_measured(again.timeline, job.plan, steps=1)


@pytest.mark.parametrize("command", ["record", "recorded"])
def test_a_rank_that_cannot_record_leaves_none_recording(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe")
    with job.launch("loopback") as run:
        own = [worker.starts for worker in run.workers.workers]

        def fail(payload: object) -> None:
            raise MemoryError("planted")

        members = run.workers.pool.members
        for failing in members:
            recording = run.record(steps=1)
            with monkeypatch.context() as patch:
                patch.setattr(failing, command, fail)
                with pytest.raises(MemoryError, match="planted"):
                    run.step(batches[0])
            assert recording.over and all(member.recording is None for member in members)
            found = [worker.starts for worker in run.workers.workers]
            assert all(a is b for a, b in zip(found, own, strict=True))
        with run.record() as again:
            run.step(batches[1])
        check_measured(again.timeline, job.plan, steps=1)


def test_of_several_shapes_those_like_the_first_are_recorded() -> None:
    job, (batch, *_) = _job("moe", "pp2", "1f1b"), batches_of("moe")
    shorter = {name: leaf[: len(leaf) // 2] for name, leaf in batch.items()}
    with job.launch("loopback") as run:
        recording = run.record(steps=3)
        for given in (batch, shorter, batch):
            run.step(given)
    check_measured(recording.timeline, job.plan, steps=2)


def test_what_is_refused() -> None:
    job = _job("moe", "pp2", "1f1b")
    with job.launch("loopback") as run:
        with pytest.raises(PiperError, match=r"record\(steps=0\)"):
            run.record(steps=0)
        run.record(steps=1)
        with pytest.raises(PiperError, match="the run records already"):
            run.record(steps=1)
    with pytest.raises(PiperError, match="closed"):
        run.record(steps=1)


@pytest.mark.parametrize("name", ["run.json", "run.timeline"])
def test_training_writes_the_steps_that_are_asked_for(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe")
    data, path = [batches[i % 3] for i in range(6)], tmp_path / name
    options = {"steps": 6, "launch": "loopback"}
    training = piper.train(job, data, record=path, record_steps="3:5", **options)
    plain = piper.train(job, data, log="none", **options)
    assert [r.loss for r in training.records] == [r.loss for r in plain.records]
    check_measured(load_timeline(path), job.plan, steps=2)
    assert "recorded 2 steps, 376 spans: " in capsys.readouterr().out


def test_training_that_ends_early_writes_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe")
    path = tmp_path / "run.timeline"
    options = {"steps": None, "launch": "loopback", "record": path}
    piper.train(job, batches[:3], record_steps=range(3, 5), **options)
    assert "of the steps 3:5 this run recorded 3:4" in capsys.readouterr().out
    check_measured(load_timeline(path), job.plan, steps=1)
    piper.train(job, batches[:3], record_steps="9:10", **options)
    assert "of the steps 9:10 this run recorded none" in capsys.readouterr().out


def test_a_training_that_is_resumed_among_its_steps_records_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe") * 3
    path = tmp_path / "run.timeline"
    options = {"launch": "loopback", "checkpoint": tmp_path / "saved", "record": path}
    piper.train(job, batches, steps=4, record_steps="2:5", **options)
    check_measured(load_timeline(path), job.plan, steps=3)
    assert "this run recorded" not in capsys.readouterr().out
    piper.train(job, batches, steps=8, record_steps="3:7", resume=True, **options)
    check_measured(load_timeline(path), job.plan, steps=2)
    assert "of the steps 3:7 this run recorded 5:7" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [4, 6])
def test_attempts_of_one_training_write_the_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    """A rank is lost in the first attempt: among the steps that are recorded, or after them."""
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe") * 3
    left = {lost}

    class Loses(piper.Callback):
        def on_step(self, record: piper.Record) -> None:
            if record.step in left:
                left.clear()
                raise RankLost("rank 1 was lost", ranks=[1], survivors=[])

    path, folder = tmp_path / "run.timeline", tmp_path / "saved"
    piper.train(
        piper.Elastic(lambda ranks: job, ranks=2, available=lambda: 2), batches, steps=8,
        launch="loopback", checkpoint=folder, checkpoint_every=3, callbacks=[Loses()],
        record=path, record_steps="3:6",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert not left and printed.count(" spans: ") == 1
    saved = re.search(r"resumed from .*step-0*(\d+)\n", printed)
    assert saved  # step 3, or 0 if that was on its way still
    first = max(3, int(saved[1]) + 1) if lost == 4 else 3
    check_measured(load_timeline(path), job.plan, steps=6 - first)
    assert ("of the steps 3:6 this run recorded 4:6" in printed) == (first == 4)
    assert ("this run recorded" in printed) == (first == 4)


@pytest.mark.parametrize("name", ["run.svg", "run.chrome.json", "run.pftrace"])
def test_training_writes_what_the_ending_says(tmp_path: Path, name: str) -> None:
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe")
    path = tmp_path / name
    options = {"steps": 2, "launch": "loopback", "log": "none"}
    piper.train(job, batches, record=path, record_steps="2:3", **options)
    data = path.read_bytes()
    if name == "run.svg":
        assert data.startswith(b"<svg")
    elif name == "run.chrome.json":
        assert json.loads(data)["traceEvents"]
    else:
        assert not is_timeline(data) and len(data) > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record_steps": "1:2"}, "record_steps=1:2 without record"),
        ({"record": "a.json", "record_steps": "2"}, "record_steps=2\n"),
        ({"record": "a.json", "record_steps": "3:3"}, "record_steps=3:3"),
        ({"record": "a.json", "record_steps": "0:3"}, "record_steps=0:3"),
        ({"record": "a.json", "record_steps": "3:5"}, r"steps 3:5 cannot be recorded: there are 3"),
        ({"record": "no/a.json"}, "no/a.json cannot be written: there is no such folder as no"),
        ({"record": "a.txt"}, "what is a.txt to be"),
    ],
)
def test_training_refuses_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    job, batches = _job("moe", "pp2", "1f1b"), batches_of("moe")
    with pytest.raises(PiperError, match=message):
        piper.train(job, batches, steps=3, launch="loopback", log="none", **options)
