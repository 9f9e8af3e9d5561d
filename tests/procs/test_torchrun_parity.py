"""Law 1 under torchrun: every rank runs the same script, and sees what one device would give."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import ZERO, Cell
from tests.procs.test_parity import CASES

LONG = "PIPER_LONG" in os.environ  # all cases of four ranks, which takes minutes
pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(1500 if LONG else 300)]

CELLS = [
    Cell(2, "dualpipev", "sharded", "moe", dp=2),
    Cell(3, "zb_h1", "sharded", "moe", dp=2),
    Cell(1, "interleaved_1f1b", "copied", "moe", dp=2),
    Cell(0, "zbv", "copied", "moe", dp=2),
]
if LONG:
    CELLS += [cell for cell in CASES if cell.num_ranks == 4]


def test_trains_like_one_device() -> None:
    assert {cell.zero for cell in CELLS} == set(ZERO)
    assert {cell.num_ranks for cell in CELLS} == {4}
    home = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
        + ["-m", "tests.procs.under_torchrun"]
        + [json.dumps(dataclasses.asdict(cell)) for cell in CELLS],
        cwd=home,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1400 if LONG else 280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        for cell in CELLS:
            assert f"rank {rank} {cell.name}: True" in done.stdout
