"""How the benchmark of the largest batch looks for it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    return importlib.import_module("largest_batch")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65])
def test_the_largest_that_fits_is_found_and_nothing_beyond_the_most_is_tried(
    search: Any, limit: int
) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert search.most_that(fits, 64) == min(limit, 64)
    assert max(tried) <= 64 and len(tried) <= 14


@pytest.mark.parametrize("bend", [0.0, 0.3, -0.3])
def test_a_line_is_followed_to_the_last_that_fits(search: Any, bend: float) -> None:
    """Also where what is measured bends away from the line through the first two."""

    def peak(rows: int) -> float:
        return 5.0 + rows + bend * max(0, rows - 3)

    for limit in (5.5, 6.0, 9.2, 14.0, 100.0):
        found = search.along_a_line(peak, limit, 16)
        fitting = [rows for rows in range(1, 17) if peak(rows) <= limit]
        assert found == max(fitting, default=0)
