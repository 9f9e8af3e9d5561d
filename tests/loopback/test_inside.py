"""The planned peak counts what bodies make for themselves, as measured on unique live storages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import piper
from piper import where
from piper.api.job import Job
from piper.api.run import Run
from piper.check import check_plan
from piper.errors import CheckError
from piper.plan import tasks
from piper.plan.body_moments import Moment
from piper.runtime.worker.storages import optimizer_tensors
from piper.schedules.table import Action, make_table
from piper.strategies import parallel

WIDTH, LAYERS = 32, 6
BATCH = torch.randn(256, 8, WIDTH)
CLOSE = 1.001  # the plan counts numbers, too, such as those of an optimizer's steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _program() -> piper.Program:
    return piper.trace(
        lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
        BATCH,
        lambda model, batch: model(batch).square().mean(),
    )


def _job(keep: Any) -> Job:
    strategy = parallel(microbatches=2, recompute=keep)
    return _program().apply(strategy).lower(optimizer=piper.adamw(lr=1e-3))


class Watch(TorchDispatchMode):
    """Sums up, after each operator, the bytes of all storages that were seen and still live, but not
    those of the user's batch."""

    def __init__(self, batch: Tensor) -> None:
        super().__init__()
        self.given = batch.untyped_storage()._cdata
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def note(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata == self.given:
                    continue
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
    watch = Watch(batch)
    [worker] = run.workers.workers  # type: ignore[attr-defined]
    watch.note([worker.slots, optimizer_tensors(worker)])
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
    plan = _job(None).plan
    body = next(t.body for t in plan.classes[0].tasks if isinstance(t, tasks.Run))
    for inside, why in [
        ({"0" * 16: (Moment(1),)}, "bytes inside"),
        ({body: (Moment(-1),)}, "bytes inside"),
        ({body: (Moment(1, makes=(0,)), Moment(1, makes=(0,)))}, "twice"),
        ({body: (Moment(1, drops=(-1,)),)}, "at no place"),
        ({body: (Moment(1, drops=(999,)),)}, "than it is called with"),
        ({body: (Moment(1, makes=(999,)),)}, "than it is called with"),
    ]:
        with pytest.raises(CheckError, match=why):
            check_plan(msgspec.structs.replace(plan, inside=inside))


def test_saved_tensors_are_freed_at_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward holds less than all that it reads and all that it makes; so says the plan."""
    job = _job(None)
    [peak] = job.report.peaks
    with job.launch("loopback") as run:
        early = measured_peak(run)
    at_once = {
        name: (Moment(max(m.own for m in moments)),) for name, moments in job.plan.inside.items()
    }
    [whole] = check_plan(msgspec.structs.replace(job.plan, inside=at_once)).peaks
    assert early <= peak.total < 0.95 * whole.total
    monkeypatch.setattr("piper.plan.local_order.handed_over", lambda *_: frozenset())
    with job.launch("loopback") as run:
        late = measured_peak(run)
    assert peak.total < late <= whole.total


def _halves(s: piper.Schedule) -> None:
    """Two stages on one rank: all BI before all BW."""
    mesh = s.mesh(pp=1, dp=1)
    s.cut("PP", 2)
    s.place(where(), mesh.at(pp=0))
    s.replicate(where(), over="dp")
    s.split(where(), "MB", 2)
    rows = [Action(stage, "F", m) for m in (0, 1) for stage in (0, 1)]
    rows += [Action(stage, kind, m) for kind in ("BI", "BW") for m in (0, 1) for stage in (1, 0)]
    s.order(make_table("halves", [rows], num_stages=2, num_microbatches=2))


def test_halves_drop_what_they_read_last() -> None:
    job = _program().apply(_halves).lower(optimizer=piper.adamw(lr=1e-3))
    phases = {task.phase for task in job.plan.classes[0].tasks if isinstance(task, tasks.Run)}
    assert phases >= {"BI", "BW"}
    with job.launch("loopback") as run:
        measured = measured_peak(run)
    [peak] = job.report.peaks
    assert measured <= peak.total <= CLOSE * measured
