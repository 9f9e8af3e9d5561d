"""Drivers that end before their time: Ctrl-C, SIGTERM, kill -9; in a step and while workers start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.procs.leavings import Leavings, Seen

pytestmark = pytest.mark.xdist_group("procs")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch import nn
import piper
from piper.strategies import parallel

def step(model, batch):
    return model(batch).square().mean()

batch = torch.ones(8, 4)
job = piper.trace(lambda: nn.Linear(4, 4), batch, step).apply(parallel(dp=2)).lower()
print("starting", flush=True)
with job.launch("local") as run:
    print("up", flush=True)
    while True:
        run.step(batch)
        print("step", flush=True)
"""
NOTICE = 3.0  # workers look twice a second


@pytest.mark.parametrize("moment", ["starting", "step"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_driver(
    leavings: Leavings, tmp_path: Path, moment: str, name: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # as a shell gives its foreground job
    )
    with driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.strip() == moment:
                break
        while len(leavings.processes()) < 2:
            time.sleep(0.02)
        seen = leavings.seen()
        if name == "SIGINT":
            os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        else:
            driver.send_signal(signal.Signals[name])
        driver.wait(30)  # workers end in a second; the interpreter takes longer on a busy machine
        _, noise = driver.communicate()
    # A shell shows a death by SIGINT as exit code 130.
    assert driver.returncode == -signal.Signals[name]
    if name == "SIGINT":
        assert noise.count("Traceback") == 1, noise  # the driver's own, as of any script
        assert noise.endswith("KeyboardInterrupt\n")
        leavings.assert_none(seen)
    else:
        assert noise == ""
        # Before they can look, workers have to import torch.
        leavings.assert_none(seen, within=NOTICE if moment == "step" else 60)


def test_a_run_that_nobody_closes_ends_with_its_script(leavings: Leavings, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    head = SCRIPT.partition("with job")[0]
    script.write_text(f'{head}run = job.launch("local")\nrun.step(batch)\n')
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    leavings.assert_none(Seen(), within=NOTICE)
