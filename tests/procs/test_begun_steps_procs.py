"""Steps that have begun, on processes: the same training, and one error for what happens meanwhile."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

import piper
from piper.errors import RunError
from piper.strategies import parallel
from tests.procs import tiny
from tests.procs.conftest import GetPool
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("procs")


def failing(share: piper.Share) -> Iterator[torch.Tensor]:
    for seed in range(4):
        yield tiny.batch(seed).chunk(2)[share.rank]
    raise OSError("disk")


def test_they_train_as_if_each_was_waited_for(pool: GetPool) -> None:
    strategy = parallel(pp=2, dp=2, zero=3, microbatches=2)
    job = program_of("dropout").apply(strategy).lower(optimizer=ADAMW, clip=0.1)
    batches = batches_of("dropout")
    with job.launch(pool(4)) as run:
        wanted = [run.step(batch) for batch in batches]
    with job.launch(pool(4)) as run:
        begun = [run.begin(batch) for batch in batches]
        assert [each.result() for each in begun] == wanted
        assert not run.differing_replicas()


def test_a_rank_that_is_killed_meanwhile() -> None:
    job = program_of("dense").apply(parallel(dp=2, microbatches=2)).lower(optimizer=ADAMW)
    batch = batches_of("dense")[0]
    with piper.LocalPool(2) as pool, job.launch(pool) as run:
        begun = run.begin(batch)
        os.kill(pool.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RunError, match="rank 1 was killed") as found:
            begun.result()
        with pytest.raises(RunError) as again:
            begun.result()
        assert again.value is found.value
        with pytest.raises(RunError, match="the worker processes have ended"):
            run.begin(batch)


@pytest.mark.parametrize("ahead", [False, True])
def test_data_that_fails_is_the_error_of_a_training_that_goes_ahead(ahead: bool) -> None:
    """Its ranks are gone, with the step that was under way."""
    program = piper.trace(tiny.model, tiny.batch(), tiny.step)
    job = program.apply(parallel(dp=2)).lower(optimizer=ADAMW)
    with pytest.raises(RunError, match=r"failed in fetch: OSError: disk"):
        piper.train(job, failing, launch="local", log="none", ahead=ahead)
