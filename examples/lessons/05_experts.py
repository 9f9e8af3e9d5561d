"""Lesson 5: experts. Each rank keeps some of them, and rows of the batch travel to where theirs are.

python examples/lessons/05_experts.py
"""

# 1. A model with experts.
import math

import expert_tower
import tower

import piper
from piper.strategies import parallel

batch = {name: leaf.double() for name, leaf in tower.batch(rows=64).items()}
program = piper.trace(lambda: expert_tower.model().double(), batch, tower.step)

# 2. Copied, and shared out.
strategies = {
    "one rank": parallel(microbatches=4),
    "copied": parallel(dp=2, microbatches=2),
    "shared out": parallel(dp=2, ep=2, microbatches=2),
    "in a pipeline": parallel(pp=2, dp=2, ep=2, zero=1, microbatches=2),
}
losses, jobs = {}, {}
for name, strategy in strategies.items():
    job = jobs[name] = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-2))
    with job.launch("loopback") as run:
        losses[name] = [run.step(batch).loss for _ in range(4)]
    kib = job.report.peaks[0].by_category["parameters"] / 1024
    print(f"{name:<14} {kib:>6.0f} KiB of parameters a rank, losses", end=" ")
    print([round(loss, 4) for loss in losses[name]])
print()

# 3. What is communicated.
for name in ("copied", "shared out"):
    print(name)
    preview = program.apply(strategies[name]).preview()
    print("\n".join(line for line in preview.splitlines() if " over " in line))
print()

# 4. What is to be learned.
parameters = {name: job.report.peaks[0].by_category["parameters"] for name, job in jobs.items()}
assert parameters["copied"] == parameters["one rank"]
assert parameters["shared out"] < 0.55 * parameters["copied"]
assert parameters["in a pipeline"] < 0.55 * parameters["shared out"]
for name, found in losses.items():
    pairs = zip(found, losses["one rank"], strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs), name
print("all four trained alike")
