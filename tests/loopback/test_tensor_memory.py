"""Law 5 where tensors are cut: memory of workers, measured on live storages, falls as it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from piper.api.job import Job
from piper.runtime.worker.storages import bytes_by_use
from piper.strategies import parallel
from tests.tensor_zoo import batches_of, program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor")

KEPT = ("parameters", "gradients", "optimizer")
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "tp4 sp": {"tp": 4, "sp": True},
}


def _measured(job: Job, name: str) -> list[dict[str, int]]:
    """Per rank what stays; and of activations what is saved at most, seen after each task."""
    with job.launch("loopback") as run:
        workers = run.workers.workers  # type: ignore[attr-defined]
        saved = [0] * len(workers)

        def seeing(start: Callable[..., Any], number: int) -> Callable[..., Any]:
            def started(*args: Any) -> Any:
                result = start(*args)
                found = bytes_by_use(workers[number]).get("saved", 0)
                saved[number] = max(saved[number], found)
                return result

            return started

        for number, worker in enumerate(workers):
            worker.starts[:] = [seeing(start, number) for start in worker.starts]
        run.step(batches_of(name)[0])
        held = run.memory()
    return [{**one, "saved": most} for one, most in zip(held, saved, strict=True)]


@pytest.mark.parametrize("name", ["rms", "mixture"])
def test_memory_falls_with_the_ranks_as_computed(name: str) -> None:
    """Parameters, gradients and state with the share that is cut; activations as the plan says: with
    sequences cut, too, in proportion to the ranks."""
    found = {}
    computed = {}
    for way, degrees in WAYS.items():
        job = program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)
        (peak,) = job.report.peaks
        found[way] = _measured(job, name)
        for rank in found[way]:
            for what in KEPT:
                assert rank[what] == pytest.approx(peak.kept[what], rel=0.02), (way, what)
            # What is alive at the peak; a moment with more saved has less of other things.
            most = peak.total - sum(peak.kept[what] for what in KEPT)
            assert 0.99 * peak.by_category["saved"] <= rank["saved"] <= most, way
        tensors, ranks = job.plan.tensors.values(), degrees.get("tp", 1)
        whole = sum(t.type.nbytes for t in tensors)
        cut = sum(t.type.nbytes for t in tensors if t.cut)
        computed[way] = whole - cut + cut / ranks
    for what in (*KEPT, "saved"):
        one, two, both, four = (max(rank[what] for rank in found[way]) for way in WAYS)
        assert four < both <= two < one, (what, one, two, both, four)
    for way in WAYS:
        for what in KEPT:
            share = found[way][0][what] / found["one"][0][what]
            assert share == pytest.approx(computed[way] / computed["one"], rel=0.02), (way, what)
