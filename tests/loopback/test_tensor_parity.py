"""Law 1 where tensors are cut: a slice of the matrix of every pair; `make matrix` runs all of it."""

from __future__ import annotations

import os
from itertools import combinations
from math import prod

import pytest

from tests.matrix import pairs
from tests.tensor_matrix import AXES, CELLS, OWN, TensorCell

pytestmark = pytest.mark.filterwarnings("ignore:the traced code changes Python state")

LONG = "PIPER_LONG" in os.environ


def _slice() -> list[TensorCell]:
    """A few cases of models of our own that together have every value."""
    own = [cell for cell in CELLS if cell.model in OWN and cell.num_ranks < 16]
    values = {cell: {(axis, getattr(cell, axis)) for axis in AXES} for cell in own}
    left, chosen = set().union(*values.values()), []
    while left:
        chosen.append(max(own, key=lambda cell: len(values[cell] & left)))
        left -= values[chosen[-1]]
    return chosen


SLICE = CELLS if LONG else _slice()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=pytest.mark.xdist_group(cell.model)) for cell in SLICE],
)
def test_trains_like_one_device_under_the_adversary(cell: TensorCell) -> None:
    errors = cell.errors(cell.job(), adversary=True)
    assert errors.exact, errors


def test_every_pair_of_values_is_covered() -> None:
    wanted = {(a, x, b, y) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert set().union(*(pairs(cell, AXES) for cell in CELLS)) == wanted
    least = prod(sorted(map(len, AXES.values()))[-2:])  # of the two longest axes, each pair once
    assert len(CELLS) == len(set(CELLS)) < 1.1 * least


def test_the_slice_has_all_ways_schedules_and_levels() -> None:
    for axis in ("way", "schedule", "zero"):
        assert {getattr(cell, axis) for cell in SLICE} == set(AXES[axis])
