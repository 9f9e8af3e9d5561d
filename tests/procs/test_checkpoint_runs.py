"""`piper train` with checkpoints: stopped, killed and resumed elsewhere, it trains as one run does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper.cli.main import main
from piper.stored.folders import checkpoints

pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(900)]

FILE = str(Path(__file__).with_name("tiny.py"))
DP2 = ["--dp", "2", "--zero", "2", "--microbatches", "2"]
PP2 = ["--pp", "2", "--microbatches", "4"]


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def _train(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["train", FILE, "--json", *arguments]) == 0
    return _events(capsys.readouterr().out)


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "piper", "train", FILE, "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    """Losses of 8 steps without a stop, by their step."""
    process = _started("--launch", "loopback", *DP2, "--steps", "8")
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return _losses(_events(out))


def _assert_like(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-6)


def test_resumed_under_other_strategies_and_launchers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undisturbed: dict[int, float]
) -> None:
    folder = ["--checkpoint", str(tmp_path / "run"), "--resume"]
    first = _train(capsys, *folder, "--launch", "local", *DP2, "--steps", "3", "--every", "2")
    saved = [event["step"] for event in first if event["event"] == "checkpoint"]
    assert saved == [2, 3]
    second = _train(capsys, *folder, "--launch", "loopback", *PP2, "--steps", "5", "--keep", "2")
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "step-00000003",
        "step-00000005",
    ]
    process = _started(*folder, "--launch", "torchrun", *DP2, "--steps", "8")
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    third = _events(out)
    assert [list(_losses(part)) for part in (first, second, third)] == [
        [1, 2, 3],
        [4, 5],
        [6, 7, 8],
    ]
    for part in (first, second, third):
        _assert_like(_losses(part), undisturbed)
    assert checkpoints(tmp_path / "run")[-1].name == "step-00000008"


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_request_to_end_saves_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    undisturbed: dict[int, float],
    launcher: str,
) -> None:
    folder = ["--checkpoint", str(tmp_path / "run"), "--resume"]
    process = _started(*folder, "--launch", launcher, *DP2, "--steps", "100000")
    assert process.stdout is not None
    out = ""
    while '"event": "step"' not in out:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        out += line
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=200)
    events = _events(out + rest)
    if launcher == "local":  # torchrun has an exit code of its own
        assert process.returncode == 143, errors
    last = max(_losses(events))
    [path] = checkpoints(tmp_path / "run")
    assert path.name == f"step-{last:08d}"
    _assert_like({k: v for k, v in _losses(events).items() if k <= 8}, undisturbed)
    more = _train(capsys, *folder, "--launch", "loopback", *DP2, "--steps", str(last + 1))
    assert list(_losses(more)) == [last + 1]


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], undisturbed: dict[int, float]
) -> None:
    folder = ["--checkpoint", str(tmp_path / "run"), "--resume"]
    process = _started(*folder, "--launch", "local", *DP2, "--steps", "100000", "--every", "1")
    while not checkpoints(tmp_path / "run"):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.kill()
    process.communicate()
    last = int(checkpoints(tmp_path / "run")[-1].name.removeprefix("step-"))
    more = _train(capsys, *folder, "--launch", "loopback", *PP2, "--steps", str(last + 2))
    assert list(_losses(more)) == [last + 1, last + 2]
    _assert_like({k: v for k, v in _losses(more).items() if k <= 8}, undisturbed)
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
