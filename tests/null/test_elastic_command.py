"""`piper train --elastic`: what it refuses, and when torchrun is started anew."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.cli.main import MISUSED, main
from piper.cli.torchrun_starts import MISTAKE, TERMINATED, _start, start_until_done
from piper.errors import RankLost
from tests.procs import tiny

TINY = tiny.__file__
_STAGES = re.compile(r"^(imported|traced|strategy|device|lowered) .*\n", re.MULTILINE)


def _refused(capsys: pytest.CaptureFixture[str], folder: Path | None, *arguments: str) -> str:
    elastic = ["--elastic", "--checkpoint", str(folder)] if folder else []
    assert main(["train", *arguments, "--steps", "2", *elastic]) == MISUSED
    return _STAGES.sub("", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "2", "--weights", "/nowhere.pt"], "/nowhere.pt"),
        (["--pp", "3", "--dp", "2"], "3"),
        (["--dp", "3"], "a batch of 8 does not divide into 3 data ranks"),
    ],
)
def test_the_strategy_that_is_asked_for_has_the_error_it_has_without_elastic(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _refused(capsys, None, TINY, *options)
    found = _refused(capsys, tmp_path / "run", TINY, *options)
    assert message in plain and found == plain
    assert "no strategy for" not in found


def test_a_saved_plan_is_not_elastic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", TINY, "--out", plan]) == 0
    message = _refused(capsys, tmp_path / "run", plan, "--data", TINY, "--launch", "single")
    assert message.startswith("OptionError: --elastic does not go with a saved plan")


def test_a_function_of_ranks_needs_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.py"
    text = """
    from piper.strategies import parallel
    from tests.procs.tiny import *

    def elastic(ranks):
        return parallel(dp=ranks)
    """
    file.write_text(textwrap.dedent(text))
    for launch in ("loopback", "torchrun"):
        message = _refused(capsys, tmp_path / "run", str(file), "--launch", launch)
        assert "for how many ranks is elastic(ranks)" in message
    seen: list[int] = []

    def train(job: piper.Elastic, *_: Any, **__: Any) -> piper.Training:
        seen.append(job.ranks)
        return piper.Training("samples")

    monkeypatch.setattr(piper, "train", train)
    command = ["train", str(file), "--launch", "loopback", "--steps", "2", "--elastic"]
    assert main([*command, "--checkpoint", str(tmp_path / "run"), "--nproc", "2"]) == 0
    assert seen == [2]


class _Torchrun:
    """Starts that each leave a checkpoint of such a step, if any, and end with a code."""

    def __init__(
        self, folder: Path, *starts: tuple[int | None, int], mistake: bool = False
    ) -> None:
        self.folder, self.starts, self.mistake = folder, list(starts), mistake
        self.num = 0

    def __call__(self, command: list[str], environment: dict[str, str]) -> int:
        assert command == ["train"]
        step, code = self.starts[self.num]
        self.num += 1
        if step is not None:
            made = self.folder / f"step-{step:08d}"
            made.mkdir(parents=True, exist_ok=True)
            (made / "piper.json").touch()
        if self.mistake:
            Path(environment[MISTAKE]).touch()
        return code


@pytest.mark.parametrize(
    ("starts", "num", "code"),
    [
        ([(4, 1), (8, 1), (12, 0)], 3, 0),
        ([(None, 1)] * 9, 3, 1),
        ([(4, 1)] * 9, 4, 1),
        ([(None, 1), (None, 1), (4, 1), (4, 1), (4, 1), (8, 0)], 6, 0),
        ([(4, 1), (4, TERMINATED)], 2, TERMINATED),
    ],
)
def test_it_starts_anew_as_long_as_checkpoints_come(
    starts: list[tuple[int | None, int]], num: int, code: int, tmp_path: Path
) -> None:
    torchrun = _Torchrun(tmp_path / "run", *starts)
    assert start_until_done(["train"], str(tmp_path / "run"), torchrun) == code
    assert torchrun.num == num


def test_it_does_not_start_anew_after_a_mistake(tmp_path: Path) -> None:
    torchrun = _Torchrun(tmp_path / "run", (4, 1), (8, 0), mistake=True)
    assert start_until_done(["train"], str(tmp_path / "run"), torchrun) == 1
    assert torchrun.num == 1


def test_what_it_started_is_asked_to_end_with_it() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); signal.pause()"
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    timer.start()
    assert _start([sys.executable, "-c", code], dict(os.environ)) == TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before
    assert _start([sys.executable, "-c", "exit(3)"], dict(os.environ)) == 3


def _lost(*_: Any, **__: Any) -> None:
    raise RankLost("rank 1 was lost", ranks=[1], survivors=[0])


@pytest.mark.parametrize(
    ("options", "train", "told"),
    [(["--every", "0"], None, True), (["--every", "1"], _lost, False)],
    ids=["a mistake", "a loss"],
)
def test_a_rank_tells_a_mistake_from_a_loss(
    options: list[str],
    train: Callable[..., None] | None,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv(MISTAKE, str(tmp_path / "mistake"))
    if train:
        monkeypatch.setattr(piper, "train", train)
    message = _refused(capsys, tmp_path / "run", TINY, "--dp=1", "--launch=torchrun", *options)
    assert message.startswith("RankLost: " if train else "RunError: --every 0")
    assert (tmp_path / "mistake").exists() == told
