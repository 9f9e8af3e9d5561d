"""Lesson 7: tensor parallelism. Two ranks work on every layer together, each on half of its matrices.

python examples/lessons/07_tensor_parallelism.py [FOLDER for timelines]
"""

# 1. The same tower, and its matrices cut.
import math
import sys
from functools import partial
from pathlib import Path

import torch
import tower

import piper
from piper import where
from piper.strategies import parallel

WIDTH = 256
batches = [tower.batch(seed, width=WIDTH) for seed in range(3)]
program = piper.trace(partial(tower.model, WIDTH), batches[0], tower.step)


def strategy(s: piper.Schedule) -> None:
    mesh = s.mesh(tp=2)
    s.place(where(), mesh.at())
    s.shard_tensor(where(), over="tp")
    s.split(where(), "MB", 2)


cut = program.apply(strategy)
print(cut.history_as_code())

# 2. What that communicates.
print(cut.preview())
print()

# 3. Beside data parallelism.
strategies = {
    "one rank": parallel(microbatches=2),
    "dp=2": parallel(dp=2),
    "tp=2": parallel(tp=2, microbatches=2),
    "dp=2 x tp=2": parallel(dp=2, tp=2),
    "pp=2 x tp=2": parallel(pp=2, tp=2, microbatches=2),
}
kept, losses = {}, {}
for name, strategy in strategies.items():
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-4))
    kept[name] = job.report.peaks[0].by_category["parameters"]
    with job.launch("loopback") as run:
        losses[name] = [run.step(batch).loss for batch in batches]
    print(f"{name:<12} {kept[name] / 2**20:>5.1f} MiB of parameters a rank, losses", end=" ")
    print([round(loss, 4) for loss in losses[name]])
print()

# 4. What is to be learned.
assert kept["dp=2"] == kept["one rank"]
assert kept["tp=2"] < 0.51 * kept["one rank"]
assert kept["pp=2 x tp=2"] < 0.26 * kept["one rank"]
for found in losses.values():
    pairs = zip(found, losses["one rank"], strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs)

# 5. What it costs.
WIDE, ROWS = 4096, 262_144
nothing = torch.zeros(1).expand(ROWS, WIDE)  # has a batch's shape, and takes no memory
large = piper.trace(partial(tower.model, WIDE), {"x": nothing, "y": nothing}, tower.step)
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
steps = {}
for name, dp, tp in (("no_cut", 16, 1), ("in_a_node", 2, 8), ("over_nodes", 1, 16)):
    job = large.apply(parallel(dp=dp, tp=tp, microbatches=2)).lower(
        precision="bf16", machine="h100"
    )
    timeline = job.simulate("h100", steps=1)
    steps[name] = timeline.step_seconds[0]
    print(f"{name:<10} dp={dp:<2} tp={tp:<2}  step {steps[name] * 1e3:.0f} ms")
    if folder:
        timeline.save(folder / f"{name}.timeline")
assert steps["in_a_node"] < steps["no_cut"] < steps["over_nodes"] / 3
