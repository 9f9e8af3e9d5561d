"""Damaged files, a few of each kind; `make fuzz-files` runs 3,000, in bounded memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz_files import SHARES, Failed, run_case, seeds

pytestmark = [
    pytest.mark.xdist_group("mutants"),  # who has made the plans already
    pytest.mark.timeout(400),
]
CASES = {"plan": 120, "schedule": 200, "strategy": 25, "body": 200, "job": 25, "program": 100}
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
