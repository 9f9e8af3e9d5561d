"""Products that leave multiprocessors free: the same results, and plans that have them train exactly."""

from __future__ import annotations

import pytest
import torch

from piper.plan.tasks import Run
from piper.runtime.order.multiprocessors import Multiprocessors
from piper.strategies import parallel
from piper.training.verify import compare
from tests.gpu.conftest import GetPool
from tests.loopback.test_lanes import shared_link
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]


def test_products_are_the_same() -> None:
    room = Multiprocessors(torch.device("cuda"))
    assert not room.problem and room.total > 4
    torch.manual_seed(0)
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.float64) for _ in range(2))
    wanted = a @ b
    try:
        for left in (4, room.total // 2, room.total):
            room.leave(left)
            torch.testing.assert_close(a @ b, wanted, rtol=1e-12, atol=1e-10)
    finally:
        room.leave(0)


@pytest.mark.parametrize("zero", [1, 3])
def test_lanes_and_room_train_like_one_device(pool: GetPool, zero: int) -> None:
    strategy = parallel(pp=2, dp=2, zero=zero, microbatches=4, bucket_size=300)
    machine = shared_link(bandwidth=1e6)
    job = program_of("deep").apply(strategy).lower(
        optimizer=ADAMW, device="cuda", machine=machine
    )  # fmt: skip
    tasks = [task for part in job.plan.classes for task in part.tasks]
    assert any(isinstance(task, Run) and task.leaves for task in tasks)
    assert "reduce:1" in {stream.name for stream in job.plan.streams}
    with job.launch(pool(4)) as run:
        errors = compare(run, batches_of("deep"), reference_of("deep", job))
    assert errors.exact, errors
