"""Lesson 6: overlap. DualPipeV has experts' communication go on beside another microbatch's work.

python examples/lessons/06_overlap.py [FOLDER for timelines]
"""

# 1. A large model with experts, of which no element exists.
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import expert_tower
import torch
import tower
from spans import hidden

import piper
from piper.schedules import dualpipev
from piper.strategies import parallel

WIDTH, ROWS = 4096, 786_432
nothing = torch.zeros(1).expand(ROWS, WIDTH)  # has a batch's shape, and takes no memory
batch = {"x": nothing, "y": nothing}
program = piper.trace(partial(expert_tower.model, WIDTH), batch, tower.step)


# 2. DualPipeV, but the backward of each pair begins.
def backward_first(*, num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    for row in dualpipev(num_ranks=num_ranks, num_microbatches=num_microbatches).rows:
        texts = [[str(action) for action in reversed(cell.actions)] for cell in row]
        yield [f"({';'.join(t)})OVERLAP_F_B" if len(t) > 1 else t[0] for t in texts]


# 3. The same step under four schedules, on 64 simulated GPUs.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
if folder:
    folder.mkdir(exist_ok=True)
steps, shares = [], []
for schedule in ("1f1b", "interleaved_1f1b", "dualpipev", backward_first):
    strategy = parallel(pp=4, dp=16, ep=16, schedule=schedule, microbatches=24)
    job = program.apply(strategy).lower(precision="bf16", machine="h100")
    timeline = job.simulate("h100", steps=1)
    steps.append(timeline.step_seconds[0])
    shares.append(hidden(timeline, "all_to_all"))
    name = schedule if isinstance(schedule, str) else schedule.__name__
    print(f"{name:<17} step {steps[-1] * 1e3:.0f} ms, all_to_all hidden {shares[-1]:.0%}")
    if folder:
        timeline.save(folder / f"{name}.timeline")

# 4. What is to be learned.
one, interleaved, dual, backward, *_ = shares
assert dual > 1.5 * max(one, interleaved)
assert backward > 1.1 * dual
assert all(later < 0.98 * earlier for earlier, later in pairwise(steps))
