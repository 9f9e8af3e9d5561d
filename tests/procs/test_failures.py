"""Workers that fail: one error that names the rank, and nothing left behind."""

import os
import signal

import pytest
import torch

from piper.errors import RunError
from tests.strategies import strategy_of
from tests.zoo import CASES, program_of

pytestmark = pytest.mark.xdist_group("procs")


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_worker_ends_the_run_and_is_named() -> None:
    job = program_of("dense").apply(strategy_of("dp2", "none")).lower()
    run = job.launch("local")
    pool = run.workers.pool  # type: ignore[attr-defined]
    pids = [process.pid for process in pool.processes]
    run.step(CASES["dense"].batch(0))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RunError, match=r"rank 1 was killed \(SIGKILL"):
        run.step(CASES["dense"].batch(1))
    assert all(_gone(pid) for pid in pids)


def test_a_worker_that_raises_is_named_with_its_task() -> None:
    job = program_of("dense").apply(strategy_of("dp2", "none")).lower()
    batch = CASES["dense"].batch(0)
    batch["tokens"][8:] += 1000  # outside the embedding, in the second rank's share
    with job.launch("local") as run, pytest.raises(RunError) as caught:
        run.step(batch)
    assert "rank 1 failed in F[PP=0,MB=0] of step 1, from place (tests/" in str(caught.value)
    assert ": IndexError" in str(caught.value)


def test_a_batch_of_another_shape_is_refused_before_anything_runs() -> None:
    job = program_of("dense").apply(strategy_of("one", "none")).lower()
    batch = CASES["dense"].batch(0)
    with job.launch("single") as run:
        loss = run.step(batch).loss
        with pytest.raises(RunError, match=r"batch:tokens is int64\[2, 4\]"):
            run.step({name: leaf[:2] for name, leaf in batch.items()})
        assert run.step(batch).loss < loss  # the run goes on
    assert torch.isfinite(torch.tensor(loss))
