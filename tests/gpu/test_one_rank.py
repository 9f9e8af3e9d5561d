"""One rank on a GPU trains like the eager module."""

import pytest
import torch

from piper.train.verify import compare
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["dense", "moe", "tied", "integers", "counted", "dropout"])
def test_trains_like_one_device(name: str) -> None:
    import piper

    program = program_of(name).apply(lambda s: s.split(piper.where(), "MB", 8))
    job = program.lower(optimizer=ADAMW, device="cuda")
    with job.launch("single") as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def test_bodies_hold_no_cpu_constants() -> None:
    job = program_of("moe").lower(device="cuda")
    used = {task.body for part in job.plan.classes for task in part.tasks if task.body}
    assert used
    assert all('"device","cpu"' not in job.bodies[name] for name in used)
