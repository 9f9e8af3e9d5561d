"""A worker imports no more than it needs: torch's compiler takes as long as torch itself."""

import subprocess
import sys

WORKER = """
import sys, torch
from piper.plan.types import ParamGroup
from piper.runtime.launch.member import Member
from piper.runtime.worker.update import Piece, Updater

Member(0)
param = torch.ones(2)
with torch.no_grad():
    groups, pieces = [ParamGroup("AdamW", {"lr": 0.5})], [Piece(0, 0, 0, 2)]
    Updater(groups, [param], [None], pieces).step([torch.ones(2)], 1.0)
assert param[0] < 1, param
print("torch._dynamo" in sys.modules)
"""


def test_a_worker_does_without_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
