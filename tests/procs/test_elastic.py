"""Training that loses ranks goes on with those that are left, and its losses are one device's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.errors import RunError
from piper.strategies import parallel
from tests.procs import tiny, unhurried

pytestmark = pytest.mark.xdist_group("procs")

FILE = str(Path(__file__).with_name("unhurried.py"))
LONG = bool(os.environ.get("PIPER_LONG"))


class Elastic:
    """`piper train --elastic`, and what it says."""

    def __init__(self, folder: Path, *arguments: str, launcher: str = "local") -> None:
        command = [
            sys.executable, "-m", "piper", "train", FILE, "--json", "--elastic", "--launch",
            launcher, "--checkpoint", str(folder / "run"), "--keep", "2", *arguments,
        ]  # fmt: skip
        self.errors = folder / "errors"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.events: list[dict[str, Any]] = []
        self.workers: dict[int, int] = {}  # rank -> its latest process
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                event = json.loads(line)
                if event["event"] == "launch":
                    found = re.findall(r"process (\d+)", event["text"])
                    self.workers[event["rank"]] = int(found[0])
                self.events.append(event)
        self.process.stdout.close()

    def until(self, words: str, seen: int) -> None:
        """Wait for another note with these words than so many, or for the end."""
        while len(self.notes(words)) <= seen and self.reader.is_alive():
            time.sleep(0.02)
        assert len(self.notes(words)) > seen, (words, self.events[-5:], self.errors.read_text())

    def kill(self, chance: random.Random) -> None:
        """One of the workers that are there now."""
        before = len(self.losses())
        while len(self.losses()) == before and self.reader.is_alive():
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.3))
        while self.reader.is_alive():  # between two launches there is none
            for rank in chance.sample(sorted(self.workers), len(self.workers)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.workers[rank], signal.SIGKILL)
                    return
            time.sleep(0.02)
        raise AssertionError(f"training ended before: {self.events[-3:]}")

    def end(self) -> None:
        self.reader.join(240)
        assert self.process.wait(30) == 0, self.errors.read_text()

    def notes(self, words: str) -> list[str]:
        found = (e["text"] for e in self.events if e["event"] == "note")
        return [text for text in found if words in text]

    def losses(self) -> dict[int, float]:
        return {e["step"]: e["loss"] for e in self.events if e["event"] == "step"}


def _undisturbed(steps: int, **degrees: Any) -> dict[int, float]:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(**degrees)).lower(optimizer=unhurried.optimizer)
    batches = [tiny.batch(number) for number in range(steps)]
    found = piper.train(job, batches, steps=steps, launch="single", log="none")
    return dict(enumerate(found.losses, 1))


@pytest.mark.parametrize(("zero", "left"), [("0", "saved step"), ("3", "an earlier one is taken")])
def test_losses_of_ranks_do_not_show_in_training(tmp_path: Path, zero: str, left: str) -> None:
    kills = 15 if LONG else 2
    steps = 100 * (kills + 1)
    chance = random.Random(int(zero))
    arguments = ["--dp", "4", "--zero", zero, "--steps", str(steps), "--every", "10"]
    run = Elastic(tmp_path, *arguments)
    for number in range(kills):
        run.kill(chance)
        run.until("went on", number)
    run.end()
    assert len(run.notes("went on")) == kills
    assert run.notes(left), [e for e in run.events if e["event"] in ("note", "warning")]
    assert run.notes("more ranks are there")
    found = run.losses()
    assert sorted(found) == list(range(1, steps + 1))
    assert found == pytest.approx(_undisturbed(steps, microbatches=4), rel=1e-5)
    seconds = [float(text.split()[2]) for text in run.notes("went on")]
    print(f"zero {zero}: {kills} losses, went on after {min(seconds)} to {max(seconds)} s")


def test_torchrun_starts_anew_and_goes_on(tmp_path: Path) -> None:
    steps = 60
    arguments = ["--dp", "2", "--microbatches", "2", "--steps", str(steps), "--every", "5"]
    run = Elastic(tmp_path, *arguments, launcher="torchrun")
    while not list((tmp_path / "run").glob("step-*5")):
        assert run.reader.is_alive(), run.errors.read_text()
        time.sleep(0.02)
    [child, *_] = [p for p in _children(run.process.pid) if "-m piper" in _command(p)]
    os.kill(child, signal.SIGKILL)
    run.end()
    assert run.notes("resumed from")
    found = run.losses()
    assert sorted(found) == list(range(1, steps + 1))
    assert found == pytest.approx(_undisturbed(steps, microbatches=4), rel=1e-5)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_too_few_ranks_and_no_folder_are_errors() -> None:
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(dp=2)).lower(optimizer=unhurried.optimizer)
    elastic = piper.Elastic(lambda ranks: job if ranks >= 2 else None, ranks=2)
    assert elastic.largest(3) is job
    with pytest.raises(RunError, match="no strategy for 1 rank"):
        elastic.largest(1)
    with pytest.raises(RunError, match="an Elastic without checkpoints"):
        piper.train(elastic, [tiny.batch()], steps=1, log="none")
    too_large = piper.Elastic(lambda ranks: job, ranks=2)
    with pytest.raises(RunError, match="the job for 1 ranks has 2"):
        too_large.largest(1)
