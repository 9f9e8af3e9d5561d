"""Tensor, sequence and context parallelism: training is that of one device, whatever else is done."""

from __future__ import annotations

from typing import Any

import pytest

from piper.strategies import parallel
from piper.training.verify import compare
from tests.tensor_zoo import batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")

# Model, degrees, and what `lower` takes.
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"tp": 2}, {}),
    ("dense", {"tp": 4, "sp": True}, {}),
    ("dense", {"tp": 2, "sp": True, "dp": 2, "zero": 3}, {"clip": 0.1}),
    ("tied", {"tp": 2, "sp": True}, {"clip": 0.1}),
    ("tied", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    ("tied", {"tp": 2, "dp": 2, "zero": 1, "microbatches": 2}, {"clip": 0.1, "late_clip": True}),
    ("fused", {"tp": 2, "sp": True}, {}),
    ("fused", {"tp": 4}, {"clip": 0.1}),
    ("fused", {"tp": 2, "dp": 2, "zero": 2, "microbatches": 2}, {}),
    ("fused", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("columns", {"tp": 2, "dp": 2, "zero": 3}, {"clip": 0.1}),
    ("grouped", {"tp": 2}, {}),
    ("grouped", {"tp": 2, "sp": True, "dp": 2, "zero": 3}, {"clip": 0.1}),
    ("grouped", {"tp": 2, "cp": 2, "pp": 2, "microbatches": 4}, {}),
    ("rms", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("rms", {"tp": 4}, {"clip": 0.1}),
    ("dropout", {"tp": 2}, {}),
    ("dropout", {"tp": 2, "sp": True, "dp": 2, "microbatches": 2}, {}),
    ("dropout", {"tp": 2, "sp": True, "recompute": "nothing"}, {}),
    ("experts", {"tp": 2}, {}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "microbatches": 2}, {}),
    ("experts", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4}, {}),
    ("mixture", {"tp": 2}, {"clip": 0.1}),
    ("mixture", {"tp": 4, "sp": True}, {}),
    ("mixture", {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2}, {"clip": 0.1}),
    ("mixture", {"tp": 2, "sp": True, "dp": 2, "ep": 2, "zero": 2, "microbatches": 2}, {}),
    ("mixture", {"tp": 2, "dp": 4, "ep": 2, "zero": 3}, {}),
    ("mixture", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "recompute": "nothing"}, {}),
    ("mixture", {"tp": 2, "cp": 2, "microbatches": 2}, {}),
    ("mixture", {"cp": 2}, {"clip": 0.1}),
    ("mixture", {"cp": 2, "cp_attention": "ring", "dp": 2, "ep": 2, "zero": 3}, {}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1}, {"clip": 0.1}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4, "zero": 1},
     {"clip": 0.1, "late_clip": True}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "zero": 3, "recompute": "nothing"}, {}),
    ("deep_mixture", {"tp": 2, "sp": True, "etp": 1, "pp": 2, "dp": 2, "ep": 4, "microbatches": 4,
                      "schedule": "dualpipev", "zero": 2}, {}),
    ("deep_mixture", {"tp": 2, "sp": True, "etp": 1, "cp": 2, "pp": 2, "dp": 2, "ep": 4,
                      "microbatches": 4, "schedule": "zb_h1", "zero": 3}, {}),
    ("deep_mixture", {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "zero": 1,
                      "schedule": "dualpipev"}, {}),
    ("deep_mixture", {"tp": 2, "sp": True, "pp": 2, "dp": 2, "ep": 2, "microbatches": 4,
                      "schedule": "zbv"}, {"clip": 0.1}),
    ("counted", {"tp": 2, "sp": True, "dp": 2, "microbatches": 2}, {"clip": 0.1}),
    ("counted", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb_h2"}, {}),
    ("dense", {"tp": 2, "strips": 2}, {"clip": 0.1}),
    ("fused", {"tp": 2, "sp": True, "strips": 4, "dp": 2, "zero": 2}, {}),
    ("tied", {"tp": 2, "sp": True, "strips": 2, "pp": 2, "microbatches": 2}, {}),
    ("dropout", {"tp": 2, "sp": True, "strips": 2, "recompute": "nothing"}, {}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4, "strips": 2}, {}),
    ("deep_counted", {"tp": 2, "sp": True, "strips": 2, "pp": 2, "microbatches": 4,
                      "schedule": "dualpipev"}, {}),
    ("dense", {"cp": 2}, {"clip": 0.1}),
    ("dense", {"cp": 4, "dp": 2, "zero": 2}, {}),
    ("rms", {"cp": 2, "tp": 2, "sp": True}, {}),
    ("dropout", {"cp": 2, "tp": 2}, {}),
    ("counted", {"cp": 2, "dp": 2, "zero": 3, "microbatches": 2}, {"clip": 0.1}),
    ("tied", {"cp": 2, "tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("fused", {"cp": 2, "pp": 2, "microbatches": 4, "recompute": "expensive"}, {}),
    ("experts", {"cp": 2}, {}),
    ("deep", {"cp": 2, "tp": 2, "sp": True, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4,
              "schedule": "zb_h1"}, {}),
    ("dense", {"cp": 2, "cp_attention": "heads"}, {"clip": 0.1}),
    ("dense", {"cp": 4, "cp_attention": "heads", "dp": 2, "zero": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "heads", "tp": 2, "sp": True}, {}),
    ("dropout", {"cp": 2, "cp_attention": "heads", "tp": 2}, {}),
    ("dense", {"cp": 4, "cp_attention": "heads", "tp": 2}, {}),  # too few heads: gathered
    ("fused", {"cp": 2, "cp_attention": "heads", "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("counted", {"cp": 2, "cp_attention": "heads", "dp": 2, "zero": 3, "microbatches": 2}, {}),
    ("dense", {"cp": 2, "cp_attention": "ring"}, {"clip": 0.1}),
    ("dense", {"cp": 4, "cp_attention": "ring", "dp": 2, "zero": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "ring", "tp": 2, "sp": True}, {}),
    ("dropout", {"cp": 4, "cp_attention": "ring", "tp": 2}, {}),
    ("dropout", {"cp": 2, "cp_attention": "ring", "recompute": "nothing"}, {}),
    ("fused", {"cp": 2, "cp_attention": "ring", "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("counted", {"cp": 4, "cp_attention": "ring", "zero": 3, "dp": 2, "microbatches": 2}, {}),
    ("deep", {"cp": 2, "cp_attention": "ring", "pp": 2, "microbatches": 4, "schedule": "dualpipev"}, {}),
    ("deep", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "dualpipev", "zero": 1}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "microbatches": 8, "schedule": "interleaved_1f1b"}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4,
              "schedule": "zbv"}, {}),
    ("deep", {"tp": 2, "pp": 4, "microbatches": 8, "schedule": "1f1b"}, {"clip": 0.1}),
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
    job = program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW, **more)
    with job.launch("loopback", adversary=adversary, seed=len(_name(row))) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors
