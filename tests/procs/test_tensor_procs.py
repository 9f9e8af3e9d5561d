"""Tensor, sequence and context parallelism on real processes, over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from piper.strategies import parallel
from piper.training.verify import compare
from tests.procs.conftest import GetPool
from tests.tensor_zoo import batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("procs")

ROWS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "dense", {"tp": 2}),
    (2, "tied", {"tp": 2, "sp": True}),
    (2, "rms", {"cp": 2}),
    (2, "dropout", {"cp": 2, "cp_attention": "heads"}),
    (2, "dense", {"cp": 2, "cp_attention": "ring"}),
    (4, "dropout", {"cp": 4, "cp_attention": "ring"}),
    (4, "rms", {"cp": 2, "tp": 2, "sp": True, "cp_attention": "heads"}),
    (4, "dense", {"cp": 2, "dp": 2, "zero": 3, "cp_attention": "heads"}),
    (2, "mixture", {"cp": 2}),
    (4, "mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4}),
]


def _name(row: tuple[int, str, dict[str, Any]]) -> str:
    size, model, degrees = row
    return "-".join([str(size), model, *(f"{k}{v}" for k, v in degrees.items())])


@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_trains_like_one_device(pool: GetPool, row: tuple[int, str, dict[str, Any]]) -> None:
    size, name, degrees = row
    job = program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)
    with job.launch(pool(size)) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors
