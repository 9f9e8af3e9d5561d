"""Lesson 2: a first schedule. Two orders of the same work: equally long, but one holds half as much.

python examples/lessons/02_first_schedule.py
"""

# 1. Two tables.
import tower

import piper
from piper.schedules import draw_text, gpipe, one_f_one_b, replay
from piper.strategies import parallel

tables = {"gpipe": gpipe, "1f1b": one_f_one_b}
replays = {}
for name, make in tables.items():
    table = make(num_ranks=4, num_microbatches=6)
    replays[name] = replay(table)
    print(name)
    print(draw_text(table, replays[name], width=120))

# 2. What a table costs.
for name, replayed in replays.items():
    print(f"{name}: bubble {replayed.bubble_of_makespan:.1%}, holds {replayed.peak_in_flight}")
print()
assert replays["gpipe"].makespan == replays["1f1b"].makespan
assert replays["gpipe"].peak_in_flight == [6, 6, 6, 6]
assert replays["1f1b"].peak_in_flight == [4, 3, 2, 1]

# 3. More microbatches, less bubble.
for microbatches in (4, 8, 16, 32):
    bubble = replay(one_f_one_b(num_ranks=4, num_microbatches=microbatches)).bubble_of_makespan
    print(f"{microbatches:>2} microbatches: bubble {bubble:.1%}")
    assert abs(bubble - 3 / (microbatches + 3)) < 1e-9  # (PP - 1) / (M + PP - 1)
print()

# 4. The tables as plans of a model.
program = piper.trace(tower.model, tower.batch(), tower.step)
losses, saved = {}, {}
for name in tables:
    strategy = parallel(pp=4, schedule=name, microbatches=8)
    job = program.apply(strategy).lower(optimizer=piper.sgd(lr=0.1))
    saved[name] = [peak.by_category["saved"] for peak in job.report.peaks]
    with job.launch("loopback") as run:
        losses[name] = [run.step(tower.batch()).loss for _ in range(3)]
    print(f"{name:<5} losses {[round(loss, 4) for loss in losses[name]]}")
    print(f"      bytes saved for backwards, rank by rank: {saved[name]}")
assert losses["gpipe"] == losses["1f1b"]  # not nearly: bit by bit
assert saved["1f1b"][0] < 0.7 * saved["gpipe"][0]
