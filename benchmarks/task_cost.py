"""Time per Task with empty bodies and the null transport: what the runtime itself costs the host."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import compile_speed
import torch
from torch import Tensor
from transformer import Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.bodies.leaves import batch_leaves
from piper.plan.tasks import Run
from piper.plan.types import RankPlan, bind
from piper.runtime.launch.shares import share_of
from piper.runtime.order.host_order import HostOrder
from piper.runtime.transport.null import NullTransport
from piper.runtime.worker.worker import Worker

RANKS, MICROBATCHES = 4, 8
TINY = Sizes(
    width=8, layers=8, heads=2, hidden=8, vocabulary=16, length=2, microbatches=8, rows=2
)  # fmt: skip


class _NoUpdate:
    """Stands for an optimizer: its arithmetic belongs to torch, like that of bodies."""

    def __init__(self, *_: Any) -> None:
        pass

    def grads_of(self, grads: list[Tensor]) -> list[Tensor]:
        return grads

    def step(self, *_: Any) -> None:
        pass

    def average(self) -> None:
        pass


def dense(schedule: str, *, dp: int = 1, zero: int = 0) -> tuple[Job, dict[str, Tensor]]:
    batch = make_batch(TINY)
    program = piper.trace(lambda: Transformer(TINY, 4 if schedule == "1f1b" else 8), batch, step)
    strategy = piper.strategies.parallel(
        pp=RANKS, dp=dp, zero=zero, schedule=schedule, microbatches=MICROBATCHES // dp,
        reduce_every=compile_speed.most_often(zero),
    )  # fmt: skip
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-4)), batch


def experts() -> tuple[Job, dict[str, Tensor]]:
    tokens = torch.zeros(2 * MICROBATCHES, 2, dtype=torch.int64)
    batch = {"x": tokens, "y": tokens}
    program = piper.trace(lambda: compile_speed.Model(2 * RANKS), batch, compile_speed.step)
    strategy = piper.strategies.parallel(
        pp=RANKS,
        dp=2,
        ep=2,
        zero=2,
        schedule="dualpipev",
        microbatches=MICROBATCHES,
        reduce_every=1,
    )
    return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-4)), batch


def empty_worker(job: Job, rank: int) -> Worker:
    """A Worker whose bodies return prepared tensors, and whose Updates change nothing."""
    me = bind(job.plan, rank)
    made = {job.bodies[t.body]: _prepared(me, t.writes) for t in me.tasks if isinstance(t, Run)}
    with (
        mock.patch("piper.runtime.worker.functions.load", made.__getitem__),
        mock.patch("piper.runtime.worker.handlers.Updater", _NoUpdate),
    ):
        return Worker(job.plan, rank, bodies=job.bodies, transport=NullTransport())


def _prepared(me: RankPlan, writes: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    slots = [me.slots[i] for i in writes]
    found = tuple(torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in slots)
    return lambda *_: found


def measure(job: Job, batch: dict[str, Tensor], *, steps: int) -> dict[str, Any]:
    """Microseconds per task on the rank with the most tasks."""
    ranks = [bind(job.plan, rank) for rank in range(job.plan.mesh.size)]
    me = max(ranks, key=lambda found: len(found.tasks))
    worker = empty_worker(job, me.rank)
    leaves = share_of(job.plan, batch_leaves(batch), me.data_rank)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        worker.step(leaves)
        times.append((time.perf_counter() - start) * 1e6)
    tasks = len(me.tasks)
    return {
        "tasks": tasks,
        "kinds": dict(Counter(task.kind for task in me.tasks)),
        "micros": statistics.median(times[steps // 5 :]) / tasks,
        "by_kind": by_kind(worker, me),
    }


def by_kind(worker: Worker, me: RankPlan) -> dict[str, float]:
    """Median microseconds that a task of each kind takes to start, without the loop around it."""
    starts = list(worker.starts)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(index: int) -> Callable[[], Any]:
        def start() -> Any:
            begin = time.perf_counter()
            found = starts[index]()
            spent[me.tasks[index].kind].append((time.perf_counter() - begin) * 1e6)
            return found

        return start

    worker.starts[:] = [timed(index) for index in range(len(starts))]
    worker.order = HostOrder(worker)
    leaves = {
        slot.source: torch.zeros(
            (worker.plan.num_microbatches * slot.shape[0], *slot.shape[1:]), dtype=torch.int64
        )
        for _, slot in worker.batch_slots
    }
    for _ in range(50):
        worker.step(leaves)
    return {kind: statistics.median(found) for kind, found in sorted(spent.items())}


def table(*, steps: int) -> list[dict[str, Any]]:
    """One row per plan."""
    plans: dict[str, Callable[[], tuple[Job, dict[str, Tensor]]]] = {
        "1F1B": lambda: dense("1f1b"),
        "interleaved 1F1B": lambda: dense("interleaved_1f1b"),
        "ZBV": lambda: dense("zbv"),
        "DualPipeV": lambda: dense("dualpipev"),
        "1F1B, dp=2, ZeRO 2": lambda: dense("1f1b", dp=2, zero=2),
        "DualPipeV, experts over 2, ZeRO 2": experts,
    }
    rows = []
    for name, make in plans.items():
        job, batch = make()
        rows.append({"plan": name, **measure(job, batch, steps=steps)})
    return rows
