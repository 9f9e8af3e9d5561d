"""Workers that fail: one error in bounded time that names the rank, and nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import piper
from piper import schedules, where
from piper.api.job import Job
from piper.api.run import Run
from piper.errors import OutOfMemory, RunError
from piper.strategies import parallel
from tests.procs.leavings import Leavings, Seen
from tests.procs.trapped import TrappedPool
from tests.strategies import strategy_of
from tests.zoo import CASES, program_of

pytestmark = pytest.mark.xdist_group("procs")

TIMEOUT = 6.0  # without progress; a busy machine needs a while for a step
AFTER = 3.0  # for the rest of an ending: answers of other ranks, and processes


def strategy(s: piper.Schedule) -> None:
    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))  # the line in the errors
    s.split(where(), "MB", 2)
    s.order(schedules.one_f_one_b(num_ranks=2, num_microbatches=2))


PLACE = f"from place (tests/procs/test_failures.py:{strategy.__code__.co_firstlineno + 3})"


@cache
def _job() -> Job:
    return program_of("dense").apply(strategy).lower()


@pytest.fixture
def trapped(leavings: Leavings) -> Iterator[tuple[TrappedPool, Run]]:
    """A run that has made a step; afterwards nothing of it may be there."""
    pool = TrappedPool(2, timeout=TIMEOUT)
    run = _job().launch(pool)
    run.step(CASES["dense"].batch(0))
    seen = leavings.seen()
    assert len(seen.ports) >= 2
    assert len(seen.pids) == 3  # their parent, too
    yield pool, run
    leavings.assert_none(seen)


def _step(run: Run, *, within: float) -> str:
    """The text of the error that the next step ends with."""
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        run.step(CASES["dense"].batch(1))
    assert time.monotonic() - began < within
    return str(caught.value)


TEXTS = {
    ("raise", 1, "F[PP=1,MB=1]"): (
        f"rank 1 failed in F[PP=1,MB=1] of step 2, {PLACE}: ValueError: sprung\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=1]@pp=0"
    ),
    ("kill", 0, "F[PP=0,MB=0]"): (
        "rank 0 was killed (SIGKILL, as the system does when memory runs out) in F[PP=0,MB=0] of "
        f"step 2, {PLACE}\n"
        "    rank 1 waited for rank 0 in recv>%x_2[MB=0]@pp=1"
    ),
    ("segv", 1, "F[PP=1,MB=0]"): (
        f"rank 1 was killed (SIGSEGV) in F[PP=1,MB=0] of step 2, {PLACE}\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=0]@pp=0"
    ),
    ("stop", 1, "F[PP=1,MB=0]"): (
        f"rank 1 hangs in F[PP=1,MB=0] of step 2, {PLACE}: its process has not run for 6 s\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=0]@pp=0"
    ),
    ("loop", 0, "F[PP=0,MB=1]"): (
        f"rank 0 hangs in F[PP=0,MB=1] of step 2, {PLACE}: no rank has got further for 6 s\n"
        "    rank 1 waited for rank 0 in recv>%x_2[MB=1]@pp=1"
    ),
    ("drop", 0, "send>%x_2[MB=1]@pp=1"): (
        f"what rank 0 gave never came to rank 1 in recv>%x_2[MB=1]@pp=1 of step 2, {PLACE}: "
        "no rank has got further for 6 s\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=1]@pp=0\n"
        "    rank 1 waited for rank 0 in recv>%x_2[MB=1]@pp=1"
    ),
}


@pytest.mark.parametrize(("what", "rank", "task"), TEXTS)
def test_one_error_says_who_where_and_what_others_waited_for(
    trapped: tuple[TrappedPool, Run], what: str, rank: int, task: str
) -> None:
    pool, run = trapped
    pool.trap(rank, task, what, step=2)
    hangs = what in ("stop", "loop", "drop")
    assert _step(run, within=(TIMEOUT if hangs else 0) + AFTER) == TEXTS[what, rank, task]
    with pytest.raises(RunError, match="the worker processes have ended"):
        run.step(CASES["dense"].batch(1))


def test_a_worker_killed_between_steps(trapped: tuple[TrappedPool, Run]) -> None:
    pool, run = trapped
    os.kill(pool.processes[1].pid, signal.SIGTERM)
    time.sleep(0.5)
    text = _step(run, within=AFTER)
    assert text.startswith(
        "rank 1 was killed (SIGTERM) after step 1\n    rank 0 waited for rank 1 in"
    )


def test_the_parent_of_workers_is_killed(trapped: tuple[TrappedPool, Run]) -> None:
    pool, run = trapped
    parent = Path(f"/proc/{pool.processes[0].pid}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(parent), signal.SIGKILL)
    time.sleep(2.0)  # workers look twice a second
    assert " was killed (SIGKILL, " in _step(run, within=AFTER)


def test_a_stopped_worker_that_cannot_even_be_told(leavings: Leavings) -> None:
    """The batch is larger than what a socket holds: to send it must not take for ever."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    batch = torch.ones(256, 2048)
    job = piper.trace(lambda: nn.Linear(2048, 1), batch, step).apply(strategy_of("dp2", "none"))
    pool = TrappedPool(2, timeout=2.0)
    run = job.lower().launch(pool)
    seen = leavings.seen()
    os.kill(pool.processes[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^rank 0 hangs before its first step: its process has not"):
        run.step(batch)
    assert time.monotonic() - began < 2.0 + AFTER
    leavings.assert_none(seen)


@pytest.mark.parametrize(
    ("trap", "text"),
    [
        ("1 start segv", "rank 1 was killed (SIGSEGV) at its start"),
        ("1 start raise", "rank 1 failed at its start: ValueError: sprung"),
        ("0 join segv", "rank 0 was killed (SIGSEGV) in join"),
        ("1 load segv", "rank 1 was killed (SIGSEGV) in load"),
    ],
)
def test_a_worker_that_dies_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
    leavings: Leavings,
    trap: str,
    text: str,
) -> None:
    monkeypatch.setenv("PIPER_TRAP", trap)
    with pytest.raises(RunError) as caught:
        _job().launch(TrappedPool(2))
    assert str(caught.value) == text
    leavings.assert_none(Seen())


def test_a_worker_that_raises_in_user_data_is_named_with_its_task() -> None:
    job = program_of("dense").apply(strategy_of("dp2", "none")).lower()
    batch = CASES["dense"].batch(0)
    batch["tokens"][8:] += 1000  # outside the embedding, in the second rank's share
    with job.launch("local") as run, pytest.raises(RunError) as caught:
        run.step(batch)
    assert "rank 1 failed in F[PP=0,MB=0] of step 1, from place (tests/" in str(caught.value)
    assert ": IndexError" in str(caught.value)
    assert "Traceback" in caught.value.__notes__[0]


class Wide(nn.Module):
    """Its activations are much larger than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def test_out_of_memory_names_the_largest_values_and_a_directive(leavings: Leavings) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    batch = torch.ones(1 << 17, 64)  # 16 MiB on each rank, and as much after each layer
    job = piper.trace(Wide, batch, step).apply(parallel(dp=2))
    pool = TrappedPool(2)
    run = job.lower().launch(pool)
    seen = leavings.seen()
    pid = pool.processes[1].pid
    with open(f"/proc/{pid}/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + (100 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    with pytest.raises(OutOfMemory) as caught:
        run.step(batch)
    text = str(caught.value)
    assert text.startswith("rank 1 ran out of memory in F[PP=")
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in text
    assert caught.value.held["saved"] >= 16 << 20
    assert "MiB saved: %" in text
    assert 'legal: recompute(where(...), keep="nothing")' in text
    leavings.assert_none(seen)


def test_a_batch_of_another_kind_is_refused_before_anything_runs() -> None:
    job = program_of("dense").apply(strategy_of("one", "none")).lower()
    batch = CASES["dense"].batch(0)
    with job.launch("single") as run:
        loss = run.step(batch).loss
        with pytest.raises(RunError, match=r": tokens is int64\[16\]"):
            run.step({name: leaf[:, 0] for name, leaf in batch.items()})
        assert run.step(batch).loss < loss  # the run goes on
    assert torch.isfinite(torch.tensor(loss))
