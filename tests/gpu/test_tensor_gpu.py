"""Cut tensors on NCCL ranks that share a GPU: training is that of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piper.strategies import parallel
from piper.training.verify import compare
from tests.gpu.conftest import GetPool
from tests.loopback.test_lanes import shared_link
from tests.tensor_zoo import batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tp": 4}),
    ("rms", {"tp": 4, "sp": True}),
    ("dropout", {"tp": 2, "sp": True, "dp": 2, "zero": 3, "microbatches": 2}),
    ("tied", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2}),
    ("counted", {"cp": 2, "tp": 2}),
    ("dense", {"cp": 4}),
    ("mixture", {"cp": 2, "dp": 2, "ep": 2}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4}),
    ("dense", {"cp": 4, "cp_attention": "ring"}),
    ("dense", {"cp": 2, "cp_attention": "ring", "tp": 2, "sp": True}),
    ("rms", {"cp": 2, "cp_attention": "heads", "dp": 2, "zero": 3, "microbatches": 2}),
    ("rms", {"tp": 2, "sp": True, "strips": 2, "dp": 2}),
    ("tied", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "recompute": "nothing"}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2, "recompute": "nothing"}),
]


@pytest.mark.parametrize(("name", "degrees"), ROWS, ids=str)
def test_trains_like_one_device(pool: GetPool, name: str, degrees: dict[str, Any]) -> None:
    strategy = parallel(**degrees)
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW, device="cuda", clip=0.1)
    with job.launch(pool(4)) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def test_microbatches_on_two_lanes_train_like_one_device(pool: GetPool) -> None:
    strategy = parallel(tp=2, sp=True, dp=2, microbatches=4)
    program = program_of("rms").apply(strategy)
    job = program.lower(optimizer=ADAMW, device="cuda", machine=shared_link(bandwidth=1e6))
    assert {"tensor", "tensor:1"} <= {stream.name for stream in job.plan.streams}
    with job.launch(pool(4)) as run:
        errors = compare(run, batches_of("rms"), reference_of("rms", job))
    assert errors.exact, errors
