"""What recording costs: microseconds per task, on empty bodies, and their share of a real step."""

from __future__ import annotations

import time

import task_cost
import torch
from transformer import Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.bodies.leaves import batch_leaves
from piper.plan.types import bind
from piper.runtime.launch.shares import share_of
from piper.runtime.record.host_recorder import HostRecorder

SIZES = Sizes(
    width=128, layers=8, heads=4, hidden=512, vocabulary=2048, length=128, microbatches=8, rows=2
)  # fmt: skip
ROUNDS, STEPS = 10, 50


def micros(job: Job, batch: dict[str, torch.Tensor]) -> float:
    """What recording adds to a task, on the rank with most of them: between the fastest steps with and
    without, taken in turns."""
    ranks = [bind(job.plan, rank) for rank in range(job.plan.mesh.size)]
    me = max(ranks, key=lambda found: len(found.tasks))
    worker = task_cost.empty_worker(job, me.rank)
    leaves = share_of(job.plan, batch_leaves(batch), me.data_rank)
    fastest = {False: float("inf"), True: float("inf")}
    for number in range(2 * ROUNDS):
        recorded = number % 2 == 1
        recorder = HostRecorder(worker) if recorded else None
        for _ in range(STEPS):
            begun = time.perf_counter()
            worker.step(leaves)
            fastest[recorded] = min(fastest[recorded], time.perf_counter() - begun)
        if recorder:
            recorder.end()
    return (fastest[True] - fastest[False]) / len(me.tasks) * 1e6


def real_step() -> tuple[int, float]:
    """Tasks and seconds of a step of a transformer on one rank."""
    batch = make_batch(SIZES)
    program = piper.trace(lambda: Transformer(SIZES, 8), batch, step)
    strategy = piper.strategies.parallel(microbatches=SIZES.microbatches)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-4))
    with job.launch("single") as run:
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            run.step(batch)
            times.append(time.perf_counter() - begun)
        return len(run.workers.workers[0].me.tasks), min(times)


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "1F1B": micros(*task_cost.dense("1f1b")),
        "1F1B, dp=2, ZeRO 2": micros(*task_cost.dense("1f1b", dp=2, zero=2)),
        "DualPipeV, experts over 2, ZeRO 2": micros(*task_cost.experts()),
    }
    for name, more in found.items():
        print(f"{name:<34} {more:.2f} us more per task")
    tasks, seconds = real_step()
    share = max(found.values()) * tasks / seconds / 1e6
    print(f"of a step of {tasks} tasks in {1e3 * seconds:.0f} ms that is {share:.3%}")


if __name__ == "__main__":
    main()
