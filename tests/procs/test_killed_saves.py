"""Kills at random moments of saving: every restart finds a whole checkpoint, and trains as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import piper
from tests.procs import tiny

pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(900)]

KILLS = 100 if os.environ.get("PIPER_LONG") else 12


def test_nothing_half_written_is_ever_taken(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.procs.killed_saves", str(tmp_path), str(KILLS), "0"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{KILLS} kills: {found['unfinished']} in the middle of saving, {found['step']} steps")
    assert found["unfinished"] >= KILLS // 4, "kills must fall into the writing"
    steps = found["step"]
    assert steps >= KILLS // 2
    job = piper.trace(tiny.model, tiny.batch(), tiny.step).lower(optimizer=tiny.optimizer)
    batches = [tiny.batch(number) for number in range(steps)]
    wanted = piper.train(
        job, batches, steps=steps, launch="single", lr_schedule=tiny.lr_schedule, log="none"
    )
    for step, loss in found["losses"]:
        if step <= steps:
            assert loss == pytest.approx(wanted.losses[step - 1], rel=1e-5), step
