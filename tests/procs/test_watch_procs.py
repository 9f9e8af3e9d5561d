"""`piper train --watch` on processes: one of torchrun's ranks serves, and Ctrl-C leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live import Listener, ask
from tests.procs.leavings import Leavings

pytestmark = pytest.mark.xdist_group("procs")

FILE = str(Path(__file__).with_name("tiny.py"))
TWO = ["--dp", "2", "--zero", "2", "--microbatches", "2"]


def _train(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "piper", "train", FILE, *TWO, "--json", "--watch", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    )


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "watch":
            return str(event["url"])
    raise AssertionError("no URL was printed")


def test_under_torchrun_rank_0_serves_and_all_record_the_same_steps() -> None:
    process = _train("--steps", "25", "--launch", "torchrun", "--watch-every", "20")
    with process, Listener(_url(process)) as listener:
        while listener.message() is not None:
            pass
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.count('"event": "watch"') == 0  # the one that was read
    assert listener.steps == list(range(1, 26)) and listener.states[-1] == "ended"
    assert listener.latest["recorded"] == {
        "number": 2,
        "step": 23,
        "steps": [3, 23],
    }  # after step 3
    assert listener.latest["facts"]["ranks"] == 2


def test_ctrl_c_is_told_and_leaves_nothing(leavings: Leavings) -> None:
    process = _train("--steps", "1000000", "--watch-every", "50")
    with process:
        url = _url(process)
        with Listener(url) as listener:
            listener.until("recorded")
            token = url.rsplit("/", 2)[1]
            assert ask(url, "GET", f"/{token}/step").status == 200
            seen = leavings.seen()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            while listener.message() is not None:
                pass
        _, errors = process.communicate(timeout=60)
    assert listener.states[-1] == "interrupted", errors
    assert process.returncode == 130 and "Traceback" not in errors
    leavings.assert_none(seen)
    with pytest.raises(OSError):
        ask(url, "GET", "/")
