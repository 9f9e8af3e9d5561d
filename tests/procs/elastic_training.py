"""`piper train --elastic` in a process of its own: what it says, and whom of it to kill."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import piper
from piper.strategies import parallel
from tests.procs import unhurried

FILE = str(Path(__file__).with_name("unhurried.py"))
NOT_MISSED = 10  # steps after a kill: the ranks take none without the one that was killed


class ElasticTraining:
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
                start_new_session=True,
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

    def lose(self, chance: random.Random) -> None:
        """Kill a worker, and wait until training has gone on without it. One that was about to end
        anyhow, because a larger job is launched, is not missed: then another one is killed."""
        before, missed = len(self.notes("went on")), False
        while not missed:
            warned = self._count("warning")
            self._kill(chance)
            stepped = self._count("step")
            while not (missed := self._count("warning") > warned) and self.reader.is_alive():
                if self._count("step") > stepped + NOT_MISSED:
                    break
                time.sleep(0.02)
        self.until("went on", before)

    def _count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    def _kill(self, chance: random.Random) -> None:
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
        if self.reader.is_alive():  # torchrun would go on
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.wait(30) == 0, self.errors.read_text()

    def notes(self, words: str) -> list[str]:
        found = (e["text"] for e in self.events if e["event"] == "note")
        return [text for text in found if words in text]

    def losses(self) -> dict[int, float]:
        return {e["step"]: e["loss"] for e in self.events if e["event"] == "step"}


def undisturbed(
    steps: int, numbers: Callable[[int], int] = lambda number: number, **degrees: Any
) -> dict[int, float]:
    """The losses of one device, whose n-th batch has that number."""
    program = piper.trace(unhurried.model, unhurried.batch(), unhurried.step)
    job = program.apply(parallel(**degrees)).lower(optimizer=unhurried.optimizer)
    batches = [unhurried.batch(numbers(number)) for number in range(steps)]
    found = piper.train(job, batches, steps=steps, launch="single", log="none")
    return dict(enumerate(found.losses, 1))
