"""Law 1: every strategy trains like one device; float64, several AdamW steps, all ranks in process.

Here is a part of the matrix with every pair of its values; `make matrix` runs all of it.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from piper.training.verify import compare
from tests.matrix import AXES, CELLS, Cell, covering, pairs
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of, reference_of

COVERING = covering(CELLS)
# What the matrix does not have: other models, one device, a stage per rank of four, ...
OTHERS = [
    ("dense", "one", "none", 0),
    ("dense", "pp2", "1f1b", 0),
    ("moe", "pp2_dp2_ep2", "gpipe", 0),
    ("moe", "ep2", "none", 2),
    ("tied", "pp2_ep2", "1f1b", 3),
    ("skip", "pp2_dp2", "zb_h1", 1),
    ("branches", "pp2_ep2", "eager_1f1b", 2),
    ("dropout", "one", "none", 0),
    ("dropout", "pp2", "dualpipe", 0),
    ("integers", "pp2", "gpipe", 0),
    ("integers", "pp2_ep2", "1f1b", 1),
    ("integers", "pp2_dp2", "zb_h2", 3),
    ("counted", "one", "none", 0),
    ("counted", "dp2", "none", 3),
    ("counted", "pp2_ep2", "zb_h1", 2),
    ("counted", "pp2_dp2", "dualpipe", 1),
    ("counted", "pp2_dp2_ep2", "1f1b", 2),
    ("deep", "pp4", "1f1b", 0),
    ("deep", "pp4", "dualpipe", 0),
    ("deep", "pp2_dp2_ep2", "interleaved_zb", 3),
    ("untagged", "pp4", "eager_1f1b", 0),
    ("untagged", "pp2_dp2_ep2", "interleaved_1f1b", 2),
    ("untagged", "pp2_dp2", "zbv", 3),
    ("untagged", "pp2_ep2", "dualpipev", 1),
]


def _params(cells: list[Cell]) -> list[object]:
    return [
        pytest.param(cell, id=cell.name, marks=pytest.mark.xdist_group(cell.program))
        for cell in cells
    ]


@pytest.mark.parametrize("cell", _params(COVERING))
def test_trains_like_one_device_under_the_adversary(cell: Cell) -> None:
    errors = cell.errors(cell.job(), adversary=True)
    assert errors.exact, errors


@pytest.mark.parametrize("cell", _params(COVERING[::12]))
def test_trains_like_one_device(cell: Cell) -> None:
    errors = cell.errors(cell.job(), adversary=False)
    assert errors.exact, errors


@pytest.mark.parametrize(
    ("name", "degrees", "schedule", "zero"),
    [
        pytest.param(*other, id="-".join(map(str, other)), marks=pytest.mark.xdist_group(other[0]))
        for other in OTHERS
    ],
)
def test_other_models_train_like_one_device(
    name: str, degrees: str, schedule: str, zero: int
) -> None:
    strategy = strategy_of(degrees, schedule, zero=zero, bucket_size=300 if zero > 1 else None)
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW)
    with job.launch("loopback", adversary=True, seed=7) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def test_every_legal_pair_of_values_is_covered() -> None:
    wanted = {(a, x, b, y) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]} - {
        ("experts", "sharded", "model", "dense")
    }
    assert set().union(*map(pairs, COVERING)) == wanted
    assert len(COVERING) == len(set(COVERING)) < len(CELLS) / 6
