"""Random kills and hangs, one after another: the right rank is named in bounded time, nothing is left
behind, and the next run starts cleanly. PIPER_CHAOS says how many, PIPER_CHAOS_SEED which."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from piper.api.job import Job
from piper.api.run import Run
from piper.errors import RunError
from piper.plan.types import bind
from piper.strategies import parallel
from tests.procs.leavings import Leavings
from tests.procs.trapped import SIGNALS, TrappedPool
from tests.zoo import CASES, program_of

pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("PIPER_CHAOS", "2"))
SEED = int(os.environ.get("PIPER_CHAOS_SEED", "0"))
TIMEOUT = 6.0  # without progress; a busy machine needs a while for a step
AFTER = 6.0  # for the rest of an ending: answers of other ranks, and processes
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2 dp2 zero2 dualpipev": (
        "deep_dense",
        {"pp": 2, "dp": 2, "zero": 2, "schedule": "dualpipev", "microbatches": 4},
    ),
    "pp4 1f1b": ("deep_dense", {"pp": 4, "microbatches": 8}),
    "dp4 zero3": ("deep_dense", {"dp": 4, "zero": 3, "microbatches": 2}),
    "pp2 ep2 zb_h1": (
        "deep_moe",
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb_h1", "microbatches": 4},
    ),
    "ep2": ("deep_moe", {"dp": 2, "ep": 2, "microbatches": 4}),
    "pp2 zbv": ("deep_dense", {"pp": 2, "schedule": "zbv", "microbatches": 4}),
}
INSIDE = (
    "raise",
    "kill",
    "segv",
    "stop",
    "loop",
)  # by a task itself; signals may also come from outside


@cache
def _job(name: str) -> tuple[Job, Any, float]:
    """A job, a batch and its loss, from a run with all ranks in this process."""
    model, degrees = STRATEGIES[name]
    job = program_of(model).apply(parallel(**degrees)).lower()
    batch = CASES[model].batch(0)
    with job.launch("loopback") as run:
        return job, batch, run.step(batch).loss


def _failing(run: Run, batch: Any, spring: Callable[[], None] | None) -> tuple[str, float]:
    """Train until it fails: the error's text, and the seconds of the step that failed."""
    if spring is not None:
        spring()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        began = time.monotonic()
        try:
            run.step(batch)
        except RunError as error:
            return str(error), time.monotonic() - began
    raise AssertionError("the run did not fail")


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_random_fault(leavings: Leavings, number: int) -> None:
    dice = random.Random(f"{SEED} {number}")
    name = dice.choice(list(STRATEGIES))
    job, batch, loss = _job(name)
    began = time.monotonic()
    pool = TrappedPool(job.plan.mesh.size, timeout=TIMEOUT)
    run = job.launch(pool)
    started = time.monotonic() - began
    assert run.step(batch).loss == pytest.approx(loss, rel=1e-5)
    seen = leavings.seen()
    rank = dice.randrange(job.plan.mesh.size)
    spring, place = None, ""
    if dice.random() < 0.5:
        what = dice.choice(INSIDE)
        task = dice.choice(list(enumerate(bind(job.plan, rank).tasks)))
        step = dice.randrange(2, 5)
        pool.trap(rank, task[0], what, step=step)
        place = f" in {task[1].name} of step {step}"
        fault = f"{what}{place}"
    else:
        what = dice.choice(list(SIGNALS))
        delay = dice.uniform(0, 1)
        pid, sent = pool.processes[rank].pid, SIGNALS[what]
        fault = f"{what} from outside after {delay:.3f} s"
        spring = threading.Timer(delay, os.kill, (pid, sent)).start
    text, seconds = _failing(run, batch, spring)
    first = text.partition("\n")[0]
    print(
        f"\n{number:2d} {name}: rank {rank} {fault}: start {started:.1f} s, ended in {seconds:.1f} s"
    )
    print(f"   {first}")
    assert text.startswith(f"rank {rank} ")
    assert place in first
    assert seconds < (TIMEOUT if what in ("stop", "loop") else 0) + AFTER
    leavings.assert_none(seen)


def test_after_all_that_a_run_starts_cleanly(leavings: Leavings) -> None:
    job, batch, loss = _job("pp2 zbv")
    with job.launch("local") as run:
        assert run.step(batch).loss == pytest.approx(loss, rel=1e-5)
        seen = leavings.seen()
    leavings.assert_none(seen)
