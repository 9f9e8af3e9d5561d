"""The parent of workers, started before there is a plan: the first run takes it, or nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import piper
from piper.runtime.launch.parent_process import cool_down
from piper.strategies import parallel
from tests.procs.leavings import Leavings, Seen

pytestmark = pytest.mark.xdist_group("procs")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import piper
piper.warm_up()
print("warm", flush=True)
import torch
from torch import nn
{rest}
"""
REFUSED = (
    "piper.trace(lambda: nn.Linear(4, 4), torch.ones(8, 4), lambda model, batch: model(batch))"
)
WAITS = "import time; time.sleep(60)"


def _step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _processes(leavings: Leavings) -> list[int]:
    """Those that there are once the first is seen."""
    deadline = time.monotonic() + 10
    while not leavings.processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    return leavings.processes()


def test_a_run_takes_what_is_warm(leavings: Leavings) -> None:
    piper.warm_up()
    piper.warm_up()  # once is enough
    parent = _processes(leavings)
    assert len(parent) == 1
    batch = torch.ones(8, 4)
    program = piper.trace(lambda: nn.Linear(4, 4), batch, _step).apply(parallel(dp=2))
    with program.lower().launch("local") as run:
        seen = leavings.seen()
        assert len(seen.pids) == 3 and set(parent) < set(seen.pids)
        losses = [run.step(batch).loss]
    leavings.assert_none(seen)
    with program.lower().launch("local") as run:  # which starts its own
        assert [run.step(batch).loss] == losses
    piper.warm_up()
    cool_down()
    leavings.assert_none(seen)


def test_nothing_is_left_after_a_program_that_is_refused(
    leavings: Leavings, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(rest=REFUSED))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    leavings.assert_none(Seen())
    assert done.returncode == 1
    assert "step returns a tensor of shape (8, 4)" in done.stderr.splitlines()[-2]


def test_nor_after_a_file_that_piper_train_refuses(leavings: Leavings, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def model(): ...\ndef batch(): ...\n")
    done = subprocess.run(
        [sys.executable, "-m", "piper", "train", str(script), "--steps", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    leavings.assert_none(Seen())
    assert done.returncode == 2
    assert done.stderr.startswith("FileError: ") and "step" in done.stderr


@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["importing", "waiting"])
def test_it_ends_with_a_driver_that_is_killed(
    leavings: Leavings, tmp_path: Path, seconds: float
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(rest=WAITS))
    with subprocess.Popen([sys.executable, str(script)], cwd=ROOT, stdout=-1) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"warm\n"
        time.sleep(seconds)
        assert len(_processes(leavings)) == 1
        seen = leavings.seen()
        driver.send_signal(signal.SIGKILL)
    leavings.assert_none(seen, within=60)  # it looks when torch is imported
