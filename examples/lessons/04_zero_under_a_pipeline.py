"""Lesson 4: ZeRO under a pipeline. Data ranks share out what each of them used to keep whole.

python examples/lessons/04_zero_under_a_pipeline.py
"""

# 1. A model with some weight.
import math
from functools import partial

import tower

import piper
from piper.strategies import parallel

WIDTH = 256
batch = tower.batch(width=WIDTH)
program = piper.trace(partial(tower.model, WIDTH), batch, tower.step)

# 2. Four levels.
KINDS = ("parameters", "gradients", "optimizer", "gathered")
print(f"{'MiB on rank 0':<14}" + "".join(f"{kind:>12}" for kind in (*KINDS, "in all")))
peaks, losses = [], []
for zero in range(4):
    strategy = parallel(pp=2, dp=2, zero=zero, microbatches=4, reduce_every=1 if zero > 1 else None)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    peak = job.report.peaks[0]
    row = [peak.by_category[kind] for kind in KINDS]
    print(f"ZeRO-{zero:<9}" + "".join(f"{nbytes / 2**20:>12.1f}" for nbytes in (*row, peak.total)))
    peaks.append(peak)
    with job.launch("loopback") as run:
        losses.append([run.step(batch).loss for _ in range(3)])
print()

# 3. What each level saves.
kept = [peak.by_category for peak in peaks]
assert kept[1]["optimizer"] < 0.51 * kept[0]["optimizer"]
assert kept[2]["gradients"] < 0.7 * kept[1]["gradients"]
assert kept[3]["parameters"] < 0.51 * kept[2]["parameters"]
assert peaks[0].total > peaks[1].total > peaks[2].total

# 4. What it costs.
for zero in (0, 1, 3):
    print(f"ZeRO-{zero}")
    preview = program.apply(parallel(pp=2, dp=2, zero=zero, microbatches=4)).preview()
    print("\n".join(line for line in preview.splitlines() if " over dp at pp=0" in line))
print()

# 5. What it does not change.
for zero, found in enumerate(losses):
    print(f"ZeRO-{zero}: losses {[round(loss, 4) for loss in found]}")
    assert all(
        math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, losses[0], strict=True)
    )
