"""One rank on a GPU trains like the eager module."""

from collections.abc import Callable

import pytest
import torch

from piper import Schedule, where
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["dense", "moe", "tied", "integers", "counted", "dropout"])
def test_trains_like_one_device(name: str) -> None:
    program = program_of(name).apply(lambda s: s.split(where(), "MB", 8))
    job = program.lower(optimizer=ADAMW, device="cuda")
    with job.launch("single") as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def halves(s: Schedule) -> None:
    """Per microbatch F, BI and BW, the weight part of one behind the forward of the next."""
    s.split(where(), "MB", 8)
    groups = [where(MB=0, phase="F"), where(MB=0, phase="BI")]
    for i in range(1, 8):
        groups += [where(MB=i, phase="F"), where(MB=i - 1, phase="BW"), where(MB=i, phase="BI")]
    s.order([*groups, where(MB=7, phase="BW")])


def recomputed(s: Schedule) -> None:
    s.recompute(where(PP=0), keep="nothing")
    s.recompute(where(PP=1), keep="expensive")
    s.split(where(), "MB", 8)


@pytest.mark.parametrize("strategy", [halves, recomputed])
@pytest.mark.parametrize("name", ["moe", "dropout"])
def test_other_backwards(name: str, strategy: Callable[[Schedule], None]) -> None:
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW, device="cuda", clip=0.5)
    with job.launch("single") as run:
        errors = compare(run, batches_of(name), train_one_device(job, batches_of(name)))
    assert errors.exact, errors


def test_bodies_hold_no_cpu_constants() -> None:
    job = program_of("moe").lower(device="cuda")
    used = {task.body for part in job.plan.classes for task in part.tasks if task.kind == "run"}
    assert used
    assert all('"device","cpu"' not in job.bodies[name] for name in used)
