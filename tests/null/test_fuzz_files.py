"""Damaged files, a few of each kind; `make fuzz-files` runs 3,000, in bounded memory."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tests.file_verdicts import Failed
from tests.fuzz_files import SHARES, TRIES, run_case, seeds

pytestmark = [
    pytest.mark.xdist_group("mutants"),  # who has made the plans already
    pytest.mark.timeout(400),
]
CASES = {
    "plan": 120, "schedule": 200, "strategy": 25, "body": 200, "job": 25, "program": 100,
    "checkpoint": 100, "weights": 120, "timeline": 150,
}  # fmt: skip
SECONDS = 40  # of one kind; a slow machine runs fewer


@pytest.mark.parametrize("kind", SHARES)
def test_damaged_files_are_refused_or_mean_what_they_say(kind: str, tmp_path: Path) -> None:
    seeds()
    begin, refused, failed = time.perf_counter(), 0, []
    for number in range(CASES[kind]):
        try:
            refused += not run_case(number, tmp_path, kinds=(kind,))[1]
        except Failed as error:
            failed.append(f"case {number}: {error}")
        if time.perf_counter() - begin > SECONDS:
            break
    assert not failed, "\n".join(failed)
    assert refused > number // 2


def test_files_that_are_not_damaged_are_accepted(tmp_path: Path) -> None:
    for kind in ("checkpoint", "weights", "timeline"):
        for seed in seeds()[kind]:
            path = tmp_path / f"case{seed.suffix}"
            path.write_bytes(seed.data)
            rng = Random(1)  # which does not remove the file
            assert TRIES[kind](path, rng, seed.original), seed.original
