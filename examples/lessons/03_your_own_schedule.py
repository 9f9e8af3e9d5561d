"""Lesson 3: your own schedule. A function of ten lines is drawn, measured, checked, and trained with.

python examples/lessons/03_your_own_schedule.py
"""

# 1. The simplest schedule that there is.
from collections.abc import Iterator

import tower

import piper
from piper.schedules import draw_text, from_rows, one_f_one_b, replay, schedule
from piper.strategies import parallel


def one_by_one(*, num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """Each microbatch goes through forward and backward before the next one begins."""
    for rank in range(num_ranks):
        yield [f"{rank}{kind}{m}" for m in range(num_microbatches) for kind in "FB"]


table = schedule(one_by_one, num_ranks=3, num_microbatches=3)
slow = replay(table)
print(draw_text(table, slow, width=120))
print(f"bubble {slow.bubble_of_makespan:.1%}, holds {slow.peak_in_flight}")
print()
assert slow.peak_in_flight == [1, 1, 1]


# 2. A better one.
def warmed_up(*, num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """Rank r is as many forwards ahead as there are ranks from it on, and then takes turns."""
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank, num_microbatches)
        row = [f"{rank}F{m}" for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(f"{rank}B{m}")
            if ahead + m < num_microbatches:
                row.append(f"{rank}F{ahead + m}")
        yield row


table = schedule(warmed_up, num_ranks=3, num_microbatches=3)
fast = replay(table)
print(draw_text(table, fast, width=120))
print(f"bubble {fast.bubble_of_makespan:.1%}, holds {fast.peak_in_flight}")
print()
assert fast.makespan < 0.6 * slow.makespan
assert table.rows == one_f_one_b(num_ranks=3, num_microbatches=3).rows

# 3. A wrong one.
try:
    from_rows(["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"], name="wrong")
except piper.PiperError as error:
    print(error)
    assert "deadlock" in str(error)
else:
    raise AssertionError("the table was not refused")
print()

# 4. Train with both.
program = piper.trace(tower.model, tower.batch(), tower.step)
losses = []
for mine in (one_by_one, warmed_up):
    strategy = parallel(pp=4, schedule=mine, microbatches=8)
    job = program.apply(strategy).lower(optimizer=piper.sgd(lr=0.1))
    with job.launch("loopback") as run:
        losses.append([run.step(tower.batch()).loss for _ in range(3)])
    print(f"{mine.__name__}: losses {[round(loss, 4) for loss in losses[-1]]}")
assert losses[0] == losses[1]
