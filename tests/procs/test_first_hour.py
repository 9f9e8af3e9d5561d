"""Metrics, skipped steps, epochs and predictions on processes are those of loopback, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.procs import first_hour
from tests.procs.conftest import GetPool

pytestmark = pytest.mark.xdist_group("procs")


def test_processes_give_what_loopback_gives(pool: GetPool) -> None:
    with first_hour.job().launch("loopback") as run:
        records, evaluated, predicted, origin = first_hour.trained(run, first_hour.batches())
    assert [record[3] for record in records] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert set(records[0][2]) == {"accuracy", "some"} and predicted.shape == (8, 3)
    assert "is given a NaN in x of the batch, in microbatch 1 of data rank 1" in origin
    for given in (first_hour.batches(), first_hour.data):
        with first_hour.job().launch(pool(4)) as run:
            found = first_hour.trained(run, given)
        assert found[0] == records and found[1] == evaluated and found[3] == origin
        assert torch.equal(found[2], predicted)


def test_ranks_of_torchrun_do_too() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        + ["-m", "tests.procs.first_hour_torchrun"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("alike: True") == 4, found.stdout
