"""Ranks that fail under torchrun: one message of ours, and all processes gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("procs")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import piper
from piper import schedules, where

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        with piper.annotate("PP"):
            x = self.table(x)
        with piper.annotate("PP"):
            return self.head(x)

def step(model, batch):
    return model(batch).square().mean()

def strategy(s):
    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.split(where(), "MB", 2)
    s.order(schedules.one_f_one_b(num_ranks=2, num_microbatches=2))

def data(share):
    yield batch
    time.sleep(1000)

class Late:
    def on_step(self, record):
        assert rank == 0
        if record.step == 2:
            raise OSError("disk full")

batch = torch.ones(8, 4, dtype=torch.int64)
job = piper.trace(Model, batch, step).apply(strategy).lower()
rank, what = int(os.environ["RANK"]), sys.argv[1]
with open(sys.argv[2] + f"/{rank}", "w") as file:
    file.write(str(os.getpid()))
with job.launch("torchrun", timeout=6.0) as run:
    if what == "data":
        piper.train(run, data, steps=3, log="none")
    if what == "callback":
        piper.train(run, [batch] * 9, steps=9, log="none", callbacks=[Late()])
    for number in range(100):
        if number == 2 and what == "raise":
            batch[4:] = 9
        elif number == 2 and rank == 0 and what in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, what))
        run.step(batch)
        if number == 2 and what == "none":
            break
"""


@pytest.mark.parametrize("what", ["raise", "SIGKILL", "SIGSTOP", "data", "callback"])
def test_one_message_and_all_processes_gone(tmp_path: Path, what: str) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, str(script), what, str(pids)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stderr, time.monotonic() - began)
    assert done.returncode != 0
    ours = re.findall(
        r"^.*?(?:piper\.errors\.|piper: )((?:RunError|RankLost): .*)$", done.stderr, re.M
    )
    place = f"from place ({script}:26)"
    if what == "raise":
        assert len(ours) == 1
        assert ours[0].startswith(
            f"RunError: rank 0 failed in F[PP=0,MB=1] of step 3, {place}: IndexError: index out of range"
        )
        assert "    rank 1 waited for rank 0 in recv>" in done.stderr
    elif what == "data":
        assert ours == [f"RunError: rank 0 hangs in data ({script}:30): no batch has come for 6 s"]
    elif what == "callback":
        line = 1 + SCRIPT.splitlines().index('            raise OSError("disk full")')
        assert ours == [f"RunError: Late.on_step ({script}:{line}): OSError: disk full"]
    elif what == "SIGSTOP":
        assert ours == ["RankLost: rank 0 hangs after step 2: its process has not run for 6 s"]
        assert "    rank 1 waited for rank 0 in recv>" in done.stderr
    else:
        assert [
            text for text in ours if not re.match(r"\w+: rank 1 lost rank 0 in recv>", text)
        ] == []
        assert len(ours) <= 1  # torchrun may be faster, and says so itself
        assert "SIGKILL" in done.stderr
    if what != "SIGKILL":
        assert "[rank1]" not in done.stderr  # which only lost its peer
    for file in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
