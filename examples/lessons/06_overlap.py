"""Lesson 6: overlap. DualPipeV has experts' communication go on beside another microbatch's work.

python examples/lessons/06_overlap.py [FOLDER for timelines]
"""

# 1. A large model with experts, of which no element exists.
import sys
from functools import partial
from pathlib import Path

import expert_tower
import torch
import tower
from spans import hidden

import piper
from piper.strategies import parallel

WIDTH, ROWS = 4096, 786_432
nothing = torch.zeros(1).expand(ROWS, WIDTH)  # has the shape of a batch, and takes no memory
batch = {"x": nothing, "y": nothing}
program = piper.trace(partial(expert_tower.model, WIDTH), batch, tower.step)

# 2. The same step under three schedules, on 64 simulated GPUs.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
steps, shares = {}, {}
for name in ("1f1b", "interleaved_1f1b", "dualpipev"):
    strategy = parallel(pp=4, dp=16, ep=16, schedule=name, microbatches=24)
    job = program.apply(strategy).lower(precision="bf16", machine="h100")
    timeline = job.simulate("h100", steps=1)
    steps[name], shares[name] = timeline.step_seconds[0], hidden(timeline, "all_to_all")
    print(f"{name:<17} step {steps[name] * 1e3:.0f} ms, all_to_all hidden {shares[name]:.0%}")
    if folder:
        timeline.save(folder / f"{name}.timeline")

# 3. What is to be learned.
assert shares["dualpipev"] > 3 * max(shares["1f1b"], shares["interleaved_1f1b"])
assert steps["dualpipev"] < 0.9 * min(steps["1f1b"], steps["interleaved_1f1b"])
