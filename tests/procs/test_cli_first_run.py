"""The first run of a newcomer: what it prints, what it takes, and what torchrun and plans make of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piper.cli.main import main

pytestmark = pytest.mark.xdist_group("procs")

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = str(Path(__file__).with_name("tiny.py"))

STDERR = (
    r"imported torch and \S+ in \d+\.\d s",
    r"traced \S+ in \d+\.\d s",
    r"applied the strategy in \d+\.\d s",
    r"strategy --pp 2 --dp 2 --ep 2: 4 ranks, mesh pp=2 dp=1 ep=2 \(the 2 data ranks are dp=1 x ep=2\)",
    r"device cpu: there is no GPU here",
    r"lowered to a plan, and proved, in \d+\.\d s",
    r"4 ranks are ready after \d+\.\d s",
)
STDOUT = (
    r"rank \d is up: process \d+ on cpu",
    r"4 ranks \(pp=2 dp=2 ep=2\), precision as written, plan \w+",
    r"step \d/3  loss \d\.\d+  lr \S+  \S+ ms  \S+ tokens/s  memory \d+ MiB  ETA \S+",
    r"evaluation after step 3: loss \d\.\d+ \(4 batches, \d+\.\d s\)",
    r"3 steps in \d+\.\d s: loss \d\.\d+ -> \d\.\d+, evaluation \d\.\d+",
)


def _run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def test_a_first_run_says_what_it_does_and_nothing_else() -> None:
    degrees = ["--pp", "2", "--dp", "2", "--ep", "2"]
    done = _run("piper", "train", str(EXAMPLES / "moe_lm.py"), *degrees, "--steps", "3")
    assert done.returncode == 0, done.stderr
    for lines, known in ((done.stderr, STDERR), (done.stdout, STDOUT)):
        strange = [
            line for line in lines.splitlines() if not any(re.fullmatch(k, line) for k in known)
        ]
        assert strange == []
    for pattern in (*STDERR[3:], STDERR[1], *STDOUT):
        assert re.search(f"^{pattern}$", done.stdout + done.stderr, re.MULTILINE), pattern


def _losses(text: str) -> list[float]:
    events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def test_torchrun_is_seen_as_it_is_by_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --launch: each process is one rank, and starts none."""
    words = ["train", FILE, "--dp", "2", "--zero", "2", "--steps", "3", "--json"]
    assert main(words) == 0
    local = _losses(capsys.readouterr().out)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _run(*torchrun, "-m", "piper", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert '"event": "launch"' not in done.stdout
    assert _losses(done.stdout) == pytest.approx(local, rel=1e-6) and len(local) == 3
    assert done.stderr == ""


def test_the_wrong_number_of_torchruns_ranks_is_told_once() -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _run(*torchrun, "-m", "piper", "train", FILE, "--dp", "4", "--steps", "3")
    assert done.returncode != 0
    message = "OptionError: torchrun started 2 ranks, but the strategy has 4 ranks (--dp 4)"
    assert done.stderr.count(message) == 1 and "legal: --nproc-per-node 4" in done.stderr


def test_a_saved_plan_trains_by_the_command_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file whose data is its batch()."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "model.py"
    file.write_text((EXAMPLES / "moe.py").read_text())
    assert main(["plan", "model.py", "--dp", "2", "--out", "plan.json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "strategy --dp 2: 2 ranks, mesh pp=1 dp=2 ep=1"
    command = printed[-1].partition("to train it: piper ")[2].split()
    assert command == ["train", "plan.json", "--data", "model.py", "--steps", "10"]
    assert main([*command, "--json"]) == 0
    saved = _losses(capsys.readouterr().out)
    assert main(["train", "model.py", "--dp", "2", "--steps", "10", "--json"]) == 0
    assert saved == _losses(capsys.readouterr().out) and len(saved) == 10


SLOW = """
import os
import time

from tests.procs.tiny import batch, model, step
from tests.procs.tiny import data as whole

if os.environ.get("SLOW_IN") != str(os.getpid()):
    time.sleep(5)


def data(share):
    return whole(share)
"""


def test_no_step_waits_for_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks import the file of the data before the first step's time begins."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    monkeypatch.setenv("SLOW_IN", str(os.getpid()))  # this process shall not wait
    assert main(["train", str(file), "--dp", "2", "--steps", "2", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    [first, _] = [event["ms"] for event in events if event["event"] == "step"]
    assert first < 4000
