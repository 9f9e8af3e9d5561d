"""Lesson 9: checkpoints. A training goes on elsewhere, and its losses do not show it.

python examples/lessons/09_checkpoints.py
"""

# 1. A training that is never interrupted.
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import tower

import piper
from piper.strategies import parallel


def batch(seed: int) -> dict[str, torch.Tensor]:
    return {name: leaf.double() for name, leaf in tower.batch(seed).items()}


program = piper.trace(lambda: tower.model().double(), batch(0), tower.step)
batches = [batch(seed) for seed in range(9)]


def job(**degrees: Any) -> piper.Job:
    return program.apply(parallel(**degrees)).lower(optimizer=piper.adamw(lr=1e-2))


with job(microbatches=8).launch("single") as run:
    expected = [run.step(each).loss for each in batches]

# 2. One that moves twice.
losses: list[float] = []
with tempfile.TemporaryDirectory() as folder:
    first, second = Path(folder, "first"), Path(folder, "second")
    four_ranks = job(pp=2, dp=2, zero=2, schedule="zb_h1", microbatches=4)
    with four_ranks.launch("loopback") as run:
        losses += [run.step(each).loss for each in batches[:3]]
        run.save(first)
    print("four ranks saved", sorted(path.suffix or path.name for path in first.iterdir()))
    with job(pp=4, tp=2, schedule="dualpipev", microbatches=8).resume(first, "loopback") as run:
        losses += [run.step(each).loss for each in batches[3:6]]
        run.save(second)
    with job(dp=2, zero=3, microbatches=4).resume(second, "loopback") as run:
        losses += [run.step(each).loss for each in batches[6:]]
print()

# 3. Nobody can tell.
where = ["4 ranks: pp=2 dp=2, ZeRO-2", "8 ranks: pp=4 tp=2, DualPipeV", "2 ranks: dp=2, ZeRO-3"]
for number, (loss, alone) in enumerate(zip(losses, expected, strict=True)):
    print(f"step {number + 1}  {loss:.4f}  one device {alone:.4f}  {where[number // 3]}")
    assert math.isclose(loss, alone, rel_tol=1e-9)
