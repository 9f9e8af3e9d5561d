"""Batches of several shapes on processes: given by the driver, read by the ranks, or under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import piper
from piper.strategies import parallel
from piper.training.verify import compare, train_one_device
from tests.loopback import ragged
from tests.procs.conftest import GetPool

pytestmark = pytest.mark.xdist_group("procs")


def test_processes_train_on_all_shapes_as_one_device_does(pool: GetPool) -> None:
    strategy = parallel(pp=2, dp=2, zero=3, microbatches=2)
    job = ragged.program().apply(strategy).lower(optimizer=piper.adamw(lr=0.01))
    batches = ragged.batches()
    reference = train_one_device(job, batches)
    with job.launch(pool(4)) as run:
        errors = compare(run, batches, reference)
        assert errors.exact, errors
    found = piper.train(job, ragged.data, steps=None, launch=pool(4), log="none")  # ranks read
    assert found.losses == pytest.approx(reference.losses, rel=1e-12)


def test_ranks_of_torchrun_compile_for_each_shape() -> None:
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "tests.procs.ragged_torchrun"],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("as one device") == 2  # ranks may write into one line
