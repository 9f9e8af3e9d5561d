"""Kill a training that saves after every step, again and again, and look at what it leaves.

python -m tests.procs.killed_saves FOLDER KILLS SEED prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import piper
from piper.api.job import Job
from piper.runtime.state import torch_metadata
from piper.runtime.state.audit import audit
from piper.stored.folders import checkpoints, found_in
from piper.strategies import parallel
from tests.procs import tiny

STEPS = 100_000


class Losses:
    """A callback that writes the loss of each step where a kill cannot take it away."""

    def __init__(self, file: Path, ready: int) -> None:
        self.file = file
        self.ready = ready

    def on_start(self, facts: dict[str, Any]) -> None:
        os.write(self.ready, b".")

    def on_step(self, record: Any) -> None:
        with open(self.file, "a") as out:
            out.write(f"{record.step} {record.loss.hex()}\n")


def _train(job: Job, folder: Path, ready: int, steps: int) -> None:
    piper.train(
        job,
        [tiny.batch(number) for number in range(steps)],
        steps=steps,
        launch="loopback",
        lr_schedule=tiny.lr_schedule,
        log="none",
        callbacks=[Losses(folder / "losses", ready)],
        checkpoint=folder / "run",
        checkpoint_every=1,
        keep=2,
        resume=True,
    )


def _killed(job: Job, folder: Path, pause: float) -> None:
    """Train in a process of its own, and kill it so long after it has begun."""
    begun, ready = os.pipe()
    child = os.fork()
    if child == 0:
        _train(job, folder, ready, STEPS)
        os._exit(1)  # it should not have got that far
    os.close(ready)
    assert os.read(begun, 1) == b"."
    os.close(begun)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    assert torch_metadata.NAME  # imported here, and not in every process
    chance = random.Random(seed)
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    strategies = [parallel(dp=2, zero=3), parallel(pp=2, microbatches=2)]
    jobs = [program.apply(strategy).lower(optimizer=tiny.optimizer) for strategy in strategies]
    unfinished = last = 0
    for number in range(kills):
        _killed(jobs[number % 2], folder, chance.uniform(0.0, 0.4))
        found = checkpoints(folder / "run")
        unfinished += any(path.name.startswith(".") for path in (folder / "run").iterdir())
        for path in found:
            problems = audit(found_in(path)[1].state(str(path)))
            assert problems == [], (number, path, problems)
        step = int(found[-1].name.removeprefix("step-")) if found else 0
        assert step >= last, (number, step, last)
        last = step
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    return {
        "kills": kills,
        "unfinished": unfinished,
        "step": last,
        "losses": [(int(step), float.fromhex(loss)) for step, loss in lines],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
