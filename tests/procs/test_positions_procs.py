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
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_ranks_of_torchrun_go_on_at_the_sample() -> None:
    begin = Progress().to_json().decode()
    first = _under_torchrun(2, dict.fromkeys(GIVEN, (2, begin)))
    second = {}
    for kind, (_, saved) in first.items():
        at = Progress.from_json(saved.encode())
        states = (True, 1) if kind == "stateful" else (False, 0)
        assert at.position.samples == 16
        assert (at.position.whole, len(at.position.states)) == states
        found, at = _part("loopback", 1, 8, 3, GIVEN[kind](), at)
        second[kind] = (found.tolist(), at.to_json().decode())
    third = _under_torchrun(4, {kind: (5, saved) for kind, (_, saved) in second.items()})
    for kind in GIVEN:
        parts = zip(first[kind][0], second[kind][0], third[kind][0], strict=True)
        assert [sum(counts) for counts in parts] == [1.0] * NUM, kind
        assert Progress.from_json(third[kind][1].encode()).position.steps == 5
