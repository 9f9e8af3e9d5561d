"""A worker imports no more than it needs: torch's compiler takes as long as torch itself."""

import pickle
import subprocess
import sys
from pathlib import Path

import piper
from piper.bodies.leaves import batch_leaves
from tests.zoo import batches_of, program_of

WORKER = """
import pickle, sys
import torch
from piper.runtime.launch.member import Member

torch.set_num_threads(1)  # as this test's own process: the same sums

with open(sys.argv[1], "rb") as file:
    load, step = pickle.load(file)
member = Member(0)
for command, payload in (("load", load), ("step", step), ("step", step)):
    status, result = member.answer(command, payload)
    assert status == "ok", result
print(result["loss"] / result["count"])
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_a_worker_does_without_the_compiler(tmp_path: Path) -> None:
    """Though it has experts and dropout, whose operators are custom ones, and an optimizer."""
    job = program_of("dropout").lower(optimizer=piper.adamw(lr=1e-3))
    batch = batches_of("dropout")[0]
    load = {"name": "train", "plan": job.plan.to_json(), "bodies": dict(job.bodies)}
    step = {"name": "train", "leaves": batch_leaves(batch), "options": [{"lr": 0.5}]}
    (tmp_path / "commands").write_bytes(pickle.dumps((load, step)))
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path / "commands")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, imported = done.stdout.splitlines()
    assert imported == "False False"
    with job.launch("single") as run:
        run.set_options({"lr": 0.5})
        assert [run.step(batch).loss for _ in range(2)][1] == float(loss)
