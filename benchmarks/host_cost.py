"""Host cost: time per Task, and steps at two pinned CPU ranks beside torch's own of the same name.

All variants train the same weights on the same microbatches with AdamW; their first losses must equal
those of one process. Each row is measured in rounds, one variant after the other, so that all meet the
same machine. Prints two tables; with `--write` also into docs/host_cost.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import task_cost
import torch
from initial_weights import weights_file
from torch_ranks import TorchRanks, batches, start
from torch_variants import SCHEDULES, num_stages, stages_of
from transformer import Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job

RANKS = 2
FIRST = 3  # steps whose losses are compared
TOLERANCE = 1e-5
DOCS = Path(__file__).parents[1] / "docs" / "host_cost.md"
SIZES = Sizes(
    width=256, layers=8, heads=8, hidden=512, vocabulary=1024, length=64, microbatches=8, rows=2
)  # fmt: skip
SMALL = Sizes(
    width=32, layers=4, heads=2, hidden=64, vocabulary=64, length=8, microbatches=4, rows=1
)  # fmt: skip
# A row: Piper's side, and torch's of the same name with what else is measured beside it.
ROWS: dict[str, list[str]] = {
    "1f1b": ["1f1b", "deepspeed"],
    "interleaved_1f1b": ["interleaved_1f1b"],
    "zbv": ["zbv"],
    "dualpipev": ["dualpipev"],
    "zero0": ["ddp"],
    "zero3": ["fsdp2"],
}

Timed = Callable[[int], tuple[list[float], list[float]]]  # steps -> losses, milliseconds of each


def lower(row: str, sizes: Sizes) -> Job:
    """Piper's side of a row. Under ZeRO 3 each layer is a region, as FSDP2 wraps it."""
    parallel = piper.strategies.parallel
    if row in SCHEDULES:
        stages = num_stages(row, RANKS)
        strategy = parallel(pp=RANKS, schedule=row, microbatches=sizes.microbatches)
    else:
        stages = sizes.layers if row == "zero3" else 1
        often = 1 if row == "zero3" else None  # as FSDP2 does
        microbatches = sizes.microbatches // RANKS
        strategy = parallel(
            dp=RANKS, zero=int(row[-1]), microbatches=microbatches, reduce_every=often
        )
    program = traced(sizes, stages).apply(strategy)
    return program.lower(optimizer=piper.adamw(lr=1e-4), weights=weights_file(sizes))


@cache
def traced(sizes: Sizes, stages: int) -> piper.Program:
    return piper.trace(lambda: Transformer(sizes, stages), make_batch(sizes), step)


def pin(pool: piper.LocalPool) -> None:
    """Every thread of each rank on its own core."""
    cores = sorted(os.sched_getaffinity(0))
    for rank, process in enumerate(pool.processes):
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def piper_steps(run: piper.Run, sizes: Sizes) -> Timed:
    given, taken = batches(sizes), 0

    def steps(num: int) -> tuple[list[float], list[float]]:
        nonlocal taken
        losses, times = [], []
        for _ in range(num):
            begin = time.perf_counter()
            losses.append(run.step(given[taken % len(given)]).loss)
            times.append((time.perf_counter() - begin) * 1e3)
            taken += 1
        return losses, times

    return steps


def processor_ms(pids: list[int]) -> list[float]:
    """What each process has used of its core so far, in all threads: other programs do not count."""
    found = []
    for pid in pids:
        parts = Path(f"/proc/{pid}/task").glob("*/schedstat")
        found.append(sum(int(part.read_text().split()[0]) for part in parts) / 1e6)
    return found


def timed_round(steps: Timed, num: int, pids: list[int]) -> tuple[float, float]:
    """The median step, and the processor time of a step on the busiest rank."""
    before = processor_ms(pids)
    _, times = steps(num)
    used = [b - a for a, b in zip(before, processor_ms(pids), strict=True)]
    return statistics.median(times), max(used) / num


def compare(name: str, losses: list[float], wanted: list[float]) -> None:
    for number, (mine, other) in enumerate(zip(losses, wanted, strict=True)):
        if not abs(mine - other) <= TOLERANCE * abs(other):
            raise SystemExit(
                f"{name}: the loss of step {number} is {mine}, one process has {other}"
            )


def floors(row: str, job: Job, ranks: TorchRanks, sizes: Sizes) -> dict[str, Timed]:
    """All ranks do their own compute and never talk: as stage modules, and as Piper's bodies."""
    if row in SCHEDULES:
        stages = [stages_of(row, rank, RANKS) for rank in range(RANKS)]
        ranks.ask("alone", "floor", stages, num_stages(row, RANKS), sizes.microbatches)
    else:
        ranks.ask("alone", "floor", [[0]] * RANKS, 1, sizes.microbatches // RANKS)
    ranks.ask("worker", "bodies", job.plan.to_json(), dict(job.bodies))
    return {name: lambda num, name=name: ranks.steps(name, num) for name in ("floor", "bodies")}


def measure(
    row: str, pool: piper.LocalPool, ranks: TorchRanks, wanted: list[float], options: Any
) -> dict[str, Any]:
    """Medians over rounds of every variant of a row, or the reason why there are none."""
    sizes = options.sizes
    job = lower(row, sizes)
    missing: dict[str, str] = {}
    with job.launch(pool) as run:
        pin(pool)
        timed: dict[str, Timed] = {"piper": piper_steps(run, sizes)}
        for name in ROWS[row]:
            try:
                ranks.ask("make", name, False)
                timed[name] = lambda num, name=name: ranks.steps(name, num)
            except RuntimeError as error:
                missing[name] = str(error)
        for name, steps in timed.items():
            compare(f"{row} of {name}", steps(FIRST)[0], wanted)
        if not options.quick:
            timed |= floors(row, job, ranks, sizes)
        pids = [[p.pid for p in side.processes] for side in (pool, ranks)]
        rounds = [
            {
                name: timed_round(steps, options.steps, pids[name != "piper"])
                for name, steps in timed.items()
            }
            for _ in range(options.rounds + 1)
        ][1:]
        for name in timed.keys() - {"piper"}:
            ranks.ask("drop", name)
    found, busy = (
        {name: statistics.median(r[name][i] for r in rounds) for name in rounds[0]} for i in (0, 1)
    )
    ratios = {
        name: sorted(r["piper"][0] / r[name][0] for r in rounds)
        for name in rounds[0].keys() - {"piper", "floor", "bodies"}
    }
    return {"row": row, "ms": found, "busy": busy, "ratios": ratios, "missing": missing}


def reference(ranks: TorchRanks) -> list[float]:
    """The losses of the plain loop in one process."""
    ranks.ask("plain", "plain", False, ranks=[0])
    losses, _ = ranks.steps("plain", FIRST, ranks=[0])
    ranks.ask("drop", "plain", ranks=[0])
    return losses


HEAD = (
    "| row | floor | Piper's bodies alone | Piper | over the floor | beside it | its step "
    "| over the floor | Piper / other, median of rounds (lowest to highest) "
    "| processor of the busiest rank: floor, bodies, Piper, other |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def lines(found: dict[str, Any]) -> list[str]:
    made = []
    ms, busy = found["ms"], found["busy"]
    floor, bodies = ms.get("floor", float("nan")), ms.get("bodies", float("nan"))
    for name, ratios in found["ratios"].items():
        made.append(
            f"| {found['row']} | {floor:.1f} ms | {bodies:.1f} ms | {ms['piper']:.1f} ms "
            f"| {ms['piper'] / floor:.3f} | {name} | {ms[name]:.1f} ms | {ms[name] / floor:.3f} "
            f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) | "
            + ", ".join(f"{busy[n]:.1f}" for n in ("floor", "bodies", "piper", name) if n in busy)
            + " ms |"
        )
    made += [
        f"| {found['row']} | | | | | {name} | did not run: {reason.splitlines()[0]} | | | |"
        for name, reason in found["missing"].items()
    ]
    return made


TASK_HEAD = (
    "| plan | tasks of a rank | µs per task | µs to start a task, by kind |\n|---|---|---|---|"
)


def task_line(found: dict[str, Any]) -> str:
    kinds = ", ".join(
        f"{kind} {micros:.1f} (x{found['kinds'][kind]})"
        for kind, micros in found["by_kind"].items()
    )
    return f"| {found['plan']} | {found['tasks']} | {found['micros']:.1f} | {kinds} |"


ABOUT_TASKS = f"""Bodies return prepared tensors, Updates change nothing, and the null transport
moves no bytes: what is left is the runtime. Median step of {task_cost.RANKS} pipeline ranks and
{task_cost.MICROBATCHES} microbatches, over the tasks of the rank that has most. A task's start
includes what it asks of torch (`add` sums gradients); the rest of the time is the loop around it."""

ABOUT_STEPS = f"""All variants train the same weights on the same microbatches with AdamW; their
first {FIRST} losses equal those of one process within {TOLERANCE:g} (relative). Each rank is one
process with one thread on one core. Piper is timed by its driver, which also sends the batch and
takes the losses; the others by their slowest rank. The floor is every rank doing its own compute
(its modules' forward and backward, AdamW) at the same time without ever talking; Piper's bodies
alone are its Workers over the null transport. `zero0` and `zero3` are `parallel(dp=2, zero=...)`:
gradients are reduced once a step, or after every microbatch."""


def write(tasks: list[str], steps: list[str], options: Any) -> None:
    sizes = options.sizes
    model = (
        f"Width {sizes.width}, {sizes.layers} layers, hidden {sizes.hidden}, vocabulary "
        f"{sizes.vocabulary}, {sizes.microbatches} microbatches of {sizes.rows} x {sizes.length} "
        f"tokens, {sizes.dtype};\n{options.rounds} rounds of {options.steps} steps after one to warm up."
    )
    parts = [
        "# Host cost",
        f"Made by `python benchmarks/host_cost.py --write` with torch {torch.__version__} and Python "
        f"{sys.version.split()[0]}.",
        *("## Time per Task", ABOUT_TASKS, "\n".join(tasks)),
        *("## Steps at two pinned CPU ranks", ABOUT_STEPS, model, "\n".join(steps)),
    ]
    DOCS.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, by comma")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a round")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model: only that losses are equal"
    )
    parser.add_argument("--no-tasks", action="store_true", help="leave out the time per Task")
    parser.add_argument("--write", action="store_true", help="also into docs/host_cost.md")
    options = parser.parse_args()
    options.sizes = SMALL if options.quick else SIZES
    if options.quick:
        options.rounds = options.steps = 1
    torch.set_num_threads(1)
    tasks = [TASK_HEAD]
    if not (options.quick or options.no_tasks):
        tasks += [task_line(found) for found in task_cost.table(steps=300)]
        print("\n".join(tasks), flush=True)
    steps = [HEAD]
    print(HEAD)
    with piper.LocalPool(RANKS) as pool, TorchRanks(RANKS, pinned=True) as ranks:
        start(ranks, options.sizes, weights_file(options.sizes))
        wanted = reference(ranks)
        for row in options.rows.split(","):
            made = lines(measure(row, pool, ranks, wanted, options))
            steps += made
            print("\n".join(made), flush=True)
    print(f"first {FIRST} losses of all variants equal those of one process: {wanted}")
    if options.write:
        write(tasks, steps, options)


if __name__ == "__main__":
    main()
