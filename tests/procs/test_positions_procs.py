"""Training that goes on in worker processes and under torchrun: each sample once an epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.errors import RunError
from piper.training.progress import Progress
from tests import counted
from tests.counted import GIVEN, NUM
from tests.procs.conftest import GetPool

pytestmark = pytest.mark.xdist_group("procs")


def _part(
    where: Any, dp: int, size: int, steps: int, data: Any, start: Progress
) -> tuple[torch.Tensor, Progress]:
    with counted.job(dp, size).launch(where) as run:
        training = piper.train(run, data, steps=steps, start=start, log="none")
        return counted.counts(run, size), Progress(position=training.position)


@pytest.mark.parametrize(
    "data", [counted.of_8, counted.begun_8, counted.plain_8, counted.stateful_8]
)
def test_ranks_that_read_go_on_at_the_sample(pool: GetPool, data: Any) -> None:
    first, at = _part(pool(2), 2, 8, 7, data, Progress())
    assert at.position.samples == 56
    assert len(at.position.states) == (2 if data is counted.stateful_8 else 0)
    second, at = _part(pool(2), 2, 8, 9, data, at)
    third, at = _part(pool(4), 4, 8, 12, data, at)
    fourth, at = _part("loopback", 2, 8, 15, data, at)
    assert (first + second + third + fourth).tolist() == [3.0] * NUM
    assert at.position.steps == 15


def test_ranks_that_read_batches_of_another_size(pool: GetPool) -> None:
    first, at = _part(pool(2), 2, 8, 7, counted.of_8, Progress())
    second, at = _part(pool(4), 4, 4, 7 + 6, counted.of_4, at)
    assert (first + second).tolist() == [2.0] * NUM


def _check_left_out(counts: list[float], at: Progress) -> None:
    """Four of the five batches of an epoch were trained on."""
    assert counts[counted.DAMAGED] == 0 and sorted(counts) == [0.0] * 8 + [1.0] * 32
    assert (at.position.steps, at.position.samples) == (4, NUM)


def test_ranks_leave_out_what_one_cannot_read(pool: GetPool) -> None:
    with counted.job(2, 8).launch(pool(2)) as run:
        training = piper.train(run, counted.damaged, steps=4, skip_unreadable=1, log="none")
        found = counted.counts(run, 8).tolist()
    _check_left_out(found, Progress(position=training.position))
    assert training.skipped == 1 and pool(2).alive
    with pytest.raises(
        RunError, match=r"(?s)a batch cannot be read, and 1 are left out already.*rank \d: OSErr"
    ):
        piper.train(
            counted.job(2, 8),
            counted.damaged,
            steps=8,
            skip_unreadable=1,
            launch=pool(2),
            log="none",
        )
    with pytest.raises(RunError, match="block 7 is damaged; this data cannot be read on behind it"):
        piper.train(
            counted.job(2, 8), counted.damaged_plain, steps=4, skip_unreadable=1, launch=pool(2),
            log="none",
        )  # fmt: skip


def test_a_rank_reads_again_and_the_others_wait(pool: GetPool) -> None:
    for data in (counted.twice_damaged, counted.twice_damaged_plain):
        with counted.job(2, 8).launch(piper.LocalPool(2)) as run:  # where nothing was tried
            training = piper.train(run, data, steps=5, read_again=2, log="none")
            assert counted.counts(run, 8).tolist() == [1.0] * NUM
            run.workers.pool.close()
        assert [record.retried for record in training.records if record.retried] == [2]


def _under_torchrun(num: int, parts: dict[str, tuple[int, str]]) -> dict[str, tuple[Any, str]]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num),
        ]
        + ["-m", "tests.procs.positions_torchrun", json.dumps(parts)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_ranks_of_torchrun_go_on_at_the_sample() -> None:
    """From four data ranks to two under torchrun, and on to one."""
    first, parts = {}, {"damaged": (4, Progress().to_json().decode())}
    for kind, make in GIVEN.items():
        first[kind], at = _part("loopback", 4, 8, 2, make(), Progress())
        parts[kind] = (4, at.to_json().decode())
    second = _under_torchrun(2, parts)
    counts, saved = second["damaged"]
    _check_left_out(counts, Progress.from_json(saved.encode()))
    for kind, make in GIVEN.items():
        counts, saved = second[kind]
        at = Progress.from_json(saved.encode())
        assert (at.position.steps, at.position.samples) == (4, 32)
        states = (True, 1) if kind == "stateful" else (False, 0)
        assert (at.position.whole, len(at.position.states)) == states
        third, at = _part("loopback", 1, 8, 5, make(), at)
        total = first[kind] + torch.tensor(counts) + third
        assert total.tolist() == [1.0] * NUM, kind
