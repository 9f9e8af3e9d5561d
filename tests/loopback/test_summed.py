"""Weight gradients that are added where they arise: exact, in less memory, and as the plan says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import piper
from piper.api.job import Job
from piper.check import check_plan
from piper.errors import CheckError, PlanError
from piper.plan.local_order import Local
from piper.plan.summed_inside import summed_inside
from piper.plan.tasks import Add
from piper.strategies import parallel
from piper.training.verify import compare
from tests.loopback.test_inside import _program, measured_peak
from tests.zoo import ADAMW, batches_of, program_of, reference_of


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU and in float64 too, where bits differ but exactness can be seen."""
    monkeypatch.setattr("piper.plan.summed_inside._adds", lambda *_: True)


def _share(job: Job) -> float:
    """Of all gradients that a rank adds, how many their bodies add."""
    part = job.plan.classes[0]
    adds = [task for task in part.tasks if isinstance(task, Add) and task.offsets]
    summed = summed_inside(Local(part.tasks, part.slots), job.plan.products, job.plan.device)
    return len(summed) / sum(len(task.terms) for task in adds)


STRATEGIES = {
    "one rank": {"microbatches": 4},
    "1f1b zero1": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "schedule": "1f1b"},
    "halves zero2": {"pp": 2, "dp": 2, "zero": 2, "microbatches": 2, "schedule": "zb_h1"},
    "zero3": {"dp": 2, "zero": 3, "microbatches": 4, "bucket_size": 300, "reduce_every": 2},
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("adversary", [False, True])
def test_exact(name: str, adversary: bool) -> None:
    job = program_of("deep_dense").apply(parallel(**STRATEGIES[name])).lower(optimizer=ADAMW)
    assert _share(job) > 0.1
    with job.launch("loopback", adversary=adversary) as run:
        errors = compare(run, batches_of("deep_dense"), reference_of("deep_dense", job))
    assert errors.exact, errors


def test_less_memory() -> None:
    """As planned, and as measured, beside the same plan without products."""
    job = _program().apply(parallel(microbatches=2)).lower(optimizer=piper.adamw(lr=1e-3))
    outside = msgspec.structs.replace(job.plan, products={})
    peaks = []
    for plan in (job.plan, outside):
        job.plan = plan
        with job.launch("loopback") as run:
            peaks.append((measured_peak(run), check_plan(plan).peaks[0].total))
    (inside, planned), (before, planned_before) = peaks
    assert inside < before and inside <= planned < planned_before


def test_impossible_products() -> None:
    job = program_of("deep_dense").apply(parallel(microbatches=2)).lower(optimizer=ADAMW)
    body = next(iter(job.plan.products))
    for products, why in [
        ({"0" * 16: (0,)}, "does not exist"),
        ({body: (0, 0)}, "twice"),
        ({body: (-1,)}, "at no place"),
        ({body: (999,)}, "more products than results"),
    ]:
        with pytest.raises(CheckError, match=why):
            check_plan(msgspec.structs.replace(job.plan, products=products))


def test_a_file_that_calls_something_else_a_product_is_refused(tmp_path: Path) -> None:
    job = program_of("deep_dense").apply(parallel(microbatches=2)).lower(optimizer=ADAMW)
    body, places = next(iter(job.plan.products.items()))
    wrong = next(place for place in range(99) if place not in places)
    job.plan = msgspec.structs.replace(job.plan, products={body: (wrong,)})
    job.save(tmp_path / "job.json")
    with pytest.raises(PlanError, match=f"has results .{wrong}. that are no products"):
        piper.load_job(tmp_path / "job.json")
