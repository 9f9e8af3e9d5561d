"""Lesson 7: tensor parallelism. Two ranks work on every layer together, each on half of its matrices.

python examples/lessons/07_tensor_parallelism.py
"""

# 1. The same tower, and its matrices cut.
import math
from functools import partial

import tower

import piper
from piper.strategies import parallel

WIDTH = 256
batch = tower.batch(width=WIDTH)
program = piper.trace(partial(tower.model, WIDTH), batch, tower.step)
cut = program.apply(parallel(tp=2, microbatches=2))
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
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    kept[name] = job.report.peaks[0].by_category["parameters"]
    with job.launch("loopback") as run:
        losses[name] = [run.step(batch).loss for _ in range(3)]
    print(f"{name:<12} {kept[name] / 2**20:>5.1f} MiB of parameters a rank, losses", end=" ")
    print([round(loss, 4) for loss in losses[name]])

# 4. What is to be learned.
assert kept["dp=2"] == kept["one rank"]
assert kept["tp=2"] < 0.51 * kept["one rank"]
assert kept["pp=2 x tp=2"] < 0.26 * kept["one rank"]
for found in losses.values():
    pairs = zip(found, losses["one rank"], strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs)
