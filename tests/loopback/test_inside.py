"""The planned peak counts what bodies make for themselves, as measured on unique live storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import piper
from piper.api.job import Job
from piper.api.run import Run
from piper.check import check_plan
from piper.errors import CheckError
from piper.strategies import parallel

WIDTH, LAYERS = 32, 6
BATCH = torch.randn(256, 8, WIDTH)
CLOSE = 1.15  # the plan counts results of a body from its start, and so a little more than there is


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _job(keep: Any) -> Job:
    program = piper.trace(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
        BATCH,
        lambda model, batch: model(batch).square().mean(),
    )
    strategy = parallel(microbatches=2, recompute=keep)
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))


class Watch(TorchDispatchMode):
    """Sums up, after each operator, the bytes of all storages that were seen and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def note(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note((args, kwargs, result))
        self.seen = {k: v for k, v in self.seen.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.seen.values()))
        return result


def measured_peak(run: Run, batch: Tensor = BATCH) -> int:
    """Of the second step, when optimizers have their state."""
    run.step(batch)
    watch = Watch()
    [worker] = run.workers.workers  # type: ignore[attr-defined]
    watch.note([worker.slots, [list(vars(u).values()) for u in worker.updaters.values()]])
    with watch:
        run.step(batch)
    return watch.peak


@pytest.mark.parametrize("keep", [None, "expensive", "nothing"])
def test_the_planned_peak_is_the_measured_one(keep: Any) -> None:
    job = _job(keep)
    with job.launch("loopback") as run:
        measured = measured_peak(run)
    [peak] = job.report.peaks
    assert measured <= peak.total <= CLOSE * measured
    assert sum(peak.by_category.values()) == peak.total
    if keep == "nothing":  # nearly all of it is inside of the one body that computes again
        assert peak.by_category["inside"] > 0.75 * peak.total
        assert peak.total - peak.by_category["inside"] < measured / 4


def test_a_limit_counts_what_bodies_make_for_themselves() -> None:
    job = _job("nothing")
    [peak] = job.report.peaks
    limit = 2 * (peak.total - peak.by_category["inside"])
    with pytest.raises(CheckError, match=r"needs .*, the limit is(?s:.*)inside "):
        check_plan(job.plan, memory_limit=limit)
    check_plan(job.plan, memory_limit=peak.total)


def test_bytes_inside_of_no_body_are_refused() -> None:
    import msgspec

    plan = _job(None).plan
    for inside in ({"0" * 16: 1}, {plan.bodies[0]: -1}):
        with pytest.raises(CheckError, match="bytes inside"):
            check_plan(msgspec.structs.replace(plan, inside=inside))
