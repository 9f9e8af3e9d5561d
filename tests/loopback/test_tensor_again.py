"""recompute of code that is cut over ranks: layers run again with their communication, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from piper.strategies import parallel
from piper.training.verify import compare
from tests.tensor_zoo import batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor_again")

# Model, degrees, and what `lower` takes.
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"tp": 2}, {"clip": 0.1}),
    ("dense", {"tp": 4, "sp": True}, {}),
    ("dropout", {"tp": 2, "sp": True, "dp": 2, "zero": 3, "microbatches": 2}, {"clip": 0.1}),
    ("dropout", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    ("tied", {"tp": 2, "dp": 2, "zero": 1, "microbatches": 2}, {"clip": 0.1, "late_clip": True}),
    ("tied", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4}, {}),
    ("fused", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("grouped", {"tp": 2, "dp": 2, "zero": 2, "microbatches": 2}, {}),
    ("counted", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h2"}, {}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "microbatches": 2}, {}),
    ("experts", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    ("dropout", {"cp": 2}, {}),
    ("rms", {"cp": 2, "tp": 2, "sp": True}, {"clip": 0.1}),
    ("dense", {"cp": 4, "cp_attention": "heads", "dp": 2, "zero": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "heads", "tp": 2, "sp": True}, {}),
    ("dropout", {"cp": 4, "cp_attention": "ring", "tp": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "ring", "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "dualpipev"}, {}),
    ("deep", {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4, "schedule": "dualpipev"}, {}),
    ("deep", {"cp": 2, "tp": 2, "sp": True, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4,
              "schedule": "zb_h1"}, {}),
    ("deep", {"tp": 2, "pp": 4, "microbatches": 8, "schedule": "1f1b"}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b"}, {}),
]  # fmt: skip


def _name(row: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    model, degrees, more = row
    return "-".join([model, *(f"{k}{v}" for k, v in (*degrees.items(), *more.items()))])


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_trains_like_one_device(
    row: tuple[str, dict[str, Any], dict[str, Any]], adversary: bool
) -> None:
    name, degrees, more = row
    strategy = parallel(**degrees, recompute="nothing")
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW, **more)
    with job.launch("loopback", adversary=adversary, seed=len(_name(row))) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors
