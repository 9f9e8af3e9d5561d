"""What the live view costs: microseconds a step, milliseconds a recorded one, and how often that is."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import moe_lm
from tests.live import Listener

import piper
from piper.strategies import parallel
from piper.training.line import Log
from piper.training.records import Record
from piper.training.watch import Watch
from piper.training.watched_steps import SECONDS, SHARE
from piper.view.live.address import DEFAULT, address_of

STEPS, EVERY, FEEDS, ROUNDS = 120, 4, 1_000, 20


def feed(listeners: int) -> float:
    """Microseconds that the view adds to a step's line, with so many browsers that listen: between the
    fastest rounds with and without, taken in turns."""
    watch = Watch(address_of(DEFAULT), 0, speaks=True)
    lines = Log("text", out=io.StringIO())
    watch.listen(lines)
    assert watch.server is not None
    browsers = [Listener(watch.server.url) for _ in range(listeners)]
    fastest = {False: float("inf"), True: float("inf")}
    for number in range(2 * ROUNDS):
        watched = number % 2 == 1
        lines.listener = watch.hear if watched else None
        fastest[watched] = min(fastest[watched], _lines(lines))
    for each in browsers:
        each.__exit__()
    watch.close()
    return fastest[True] - fastest[False]


def _lines(lines: Log) -> float:
    begun = time.perf_counter()
    for step in range(FEEDS):
        lines.step(_record(step), FEEDS, 1.0)
    return (time.perf_counter() - begun) / FEEDS * 1e6


def _record(step: int) -> Record:
    return Record(
        step=step, loss=2.0, norm=1.0, lr=1e-3, ms=10.0, per_second=1e4, mfu=None, memory=1 << 28
    )


class Steps(piper.Callback):
    def __init__(self) -> None:
        self.ms: dict[bool, list[float]] = {True: [], False: []}

    def on_step(self, record: Any) -> None:
        if record.step > 3:
            self.ms[(record.step - 3) % EVERY == 0].append(record.ms)


def recorded() -> tuple[float, float]:
    """Milliseconds of a step, and of one that is recorded, in one run of four processes."""
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, schedule="dualpipev", microbatches=4)
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))
    steps = Steps()
    with redirect_stdout(io.StringIO()):
        piper.train(
            job, moe_lm.data, steps=STEPS, launch="local", watch=True, watch_every=EVERY,
            callbacks=[steps],
        )  # fmt: skip
    return median(steps.ms[False]), median(steps.ms[True])


def main() -> None:
    for listeners in (0, 1, 8):
        print(f"a step's numbers, {listeners} browsers: {feed(listeners):.1f} µs")
    plain, measured = recorded()
    pause = max((measured - plain) / SHARE, SECONDS * 1e3) / plain
    print(
        f"a step {plain:.0f} ms, a recorded one {measured:.0f} ms: one in {pause:.0f} is recorded"
    )


if __name__ == "__main__":
    main()
