"""Lesson 10: GPUs, Ray and several hosts. One script, and three ways to start its ranks.

python examples/lessons/10_more_machines.py
torchrun --nproc-per-node 2 examples/lessons/10_more_machines.py
python examples/lessons/10_more_machines.py ray
"""

# 1. A job for the device that is here.
import math
import os
import sys

import torch
import tower

import piper
from piper.strategies import parallel


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = piper.trace(tower.model, tower.batch(), tower.step)
    strategy = parallel(pp=2, schedule="zb_h1", microbatches=4)
    job = program.apply(strategy).lower(optimizer=piper.sgd(lr=0.1), device=device)

    # 2. Who starts the ranks.
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "local"
    launcher = sys.argv[1] if len(sys.argv) > 1 else launcher
    with job.launch(launcher) as run:
        losses = [run.step(tower.batch(seed)).loss for seed in range(3)]

    # 3. The same training in this process, for comparison.
    with job.launch("loopback") as run:
        expected = [run.step(tower.batch(seed)).loss for seed in range(3)]
    if os.environ.get("RANK", "0") == "0":
        shown = [round(loss, 4) for loss in losses]
        print(f"{job.plan.mesh.size} ranks on {device}, started by {launcher}: {shown}")
    pairs = zip(losses, expected, strict=True)
    assert all(math.isclose(loss, other, rel_tol=1e-5) for loss, other in pairs)


if __name__ == "__main__":
    main()
