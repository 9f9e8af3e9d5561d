"""Drivers that end before their time: Ctrl-C, SIGTERM, kill -9; in a step and while workers start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
    with _ended(driver):
        _await(driver, moment)
        while len(leavings.processes()) < 3:  # two workers and their parent
            time.sleep(0.02)
        seen = leavings.seen()
        if name == "SIGINT":
            os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        else:
            driver.send_signal(signal.Signals[name])
        driver.wait(30)  # workers end in a second; the interpreter takes longer on a busy machine
        _, noise = driver.communicate()
    # A shell shows a death by SIGINT as exit code 130.
    assert driver.returncode == -signal.Signals[name], noise
    if name == "SIGINT":
        assert noise.count("Traceback") == 1, noise  # the driver's own, as of any script
        assert noise.endswith("KeyboardInterrupt\n")
        leavings.assert_none(seen)
    else:
        assert noise == ""
        # Before they can look, workers have to import torch.
        leavings.assert_none(seen, within=NOTICE if moment == "step" else 60)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """No process outlives its test, whatever becomes of that."""
    with process:
        try:
            yield
        finally:
            process.kill()


def _await(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.strip() == line:
            return
    raise AssertionError(f"no line {line!r}")


HURRIED = """
import os, signal, subprocess, sys, time
from piper.runtime.launch.parent_process import PROGRAM, ParentProcess

def interrupt(*_):
    if asking:
        raise KeyboardInterrupt

asking, num, end = False, 0, time.monotonic() + 4
signal.signal(signal.SIGINT, interrupt)
parent = ParentProcess(PROGRAM)
fires = f"import os, time\\nwhile True: time.sleep(2e-4); os.kill({os.getpid()}, {signal.SIGINT})"
other = subprocess.Popen([sys.executable, "-c", fires])
while time.monotonic() < end:
    try:
        asking = True
        while time.monotonic() < end:
            assert parent.code is None
        asking = False
    except KeyboardInterrupt:
        asking, num = False, num + 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
other.kill()
other.wait()
assert num > 1000, num
parent.close()
print("closed")
"""


def test_an_interrupt_in_any_moment_leaves_an_end_that_ends(tmp_path: Path) -> None:
    """A pool asks in each step whether its processes live, so that many a Ctrl-C comes just then."""
    script = tmp_path / "hurried.py"
    script.write_text(HURRIED)
    ran = subprocess.run([sys.executable, str(script)], timeout=100, capture_output=True, text=True)
    assert ran.stdout == "closed\n", ran.stderr


def _ignored(pid: int) -> set[signal.Signals]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


BACKGROUND_SIGNALS = ("INT", "QUIT", "TERM", "HUP")
BACKGROUND = (
    f"trap '' {' '.join(BACKGROUND_SIGNALS)}" + '; exec "$0" "$@"'
)  # as shells and nohup do


def test_workers_of_a_background_job_heed_signals(leavings: Leavings, tmp_path: Path) -> None:
    """But Ctrl-C, which is their driver's, and what nohup is for."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    driver = subprocess.Popen(
        ["sh", "-c", BACKGROUND, sys.executable, str(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with _ended(driver):
        _await(driver, "step")
        seen = leavings.seen()
        assert len(seen.pids) == 3  # their parent, too
        for pid in seen.pids:
            ignored = _ignored(pid) & {signal.Signals[f"SIG{n}"] for n in BACKGROUND_SIGNALS}
            assert ignored == {signal.SIGINT, signal.SIGHUP}
    leavings.assert_none(seen, within=NOTICE)


def test_tests_of_a_background_job_interrupt_what_they_start(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_child():\n"
        "    code = 'import signal; print(signal.getsignal(signal.SIGINT).__name__)'\n"
        "    found = subprocess.check_output([sys.executable, '-c', code], text=True)\n"
        "    assert found == 'default_int_handler\\n'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", BACKGROUND, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_zombie_of_an_earlier_test_is_not_counted(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as earlier, subprocess.Popen(["cat"], stdin=-1) as later:
        os.waitid(os.P_PID, earlier.pid, os.WEXITED | os.WNOWAIT)
        leavings = Leavings(tmp_path)
        leavings.assert_none(Seen())
        assert later.stdin is not None
        later.stdin.close()
        os.waitid(os.P_PID, later.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AssertionError, match=f"'zombies': .{later.pid}"):
            leavings.assert_none(Seen())


def test_a_run_that_nobody_closes_ends_with_its_script(leavings: Leavings, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    head = SCRIPT.partition("with job")[0]
    script.write_text(f'{head}run = job.launch("local")\nrun.step(batch)\n')
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    leavings.assert_none(Seen(), within=NOTICE)
