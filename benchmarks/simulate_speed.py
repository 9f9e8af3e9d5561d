"""Simulation speed: a million tasks, rank by rank and by classes of ranks; one strategy on 16 and on
16,384 ranks.

The plans are those of `compile_speed.py`. Seconds are CPU time of the process, behind them those on the
clock; `explain` is what `piper simulate` prints. `--only N` takes the first N cases.
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from compile_speed import compile_once, traced

from piper.check.parties import compressed, expanded
from piper.cost.presets import machine
from piper.insight.causes import Causes
from piper.insight.step_text import step_text
from piper.no_collections import no_collections
from piper.plan.types import Plan
from piper.sim.engine import Times
from piper.sim.simulate import Simulation
from piper.sim.task_costs import MachineCosts


class Case(NamedTuple):
    """DualPipeV with experts on pp x dp ranks, some steps of it, on a machine."""

    pp: int
    dp: int
    microbatches: int
    machine: str
    by_rank: bool
    steps: int = 1


CASES = [
    Case(4, 4, 32, "h100", False),
    Case(4, 4096, 32, "h100", False),
    Case(4, 150, 32, "h100", True),
    Case(4, 150, 32, "cpu", True),
    Case(8, 4, 192, "h100", False),
    Case(8, 4, 192, "h100", False, steps=13),
]


@functools.lru_cache(maxsize=1)
def compiled(pp: int, dp: int, microbatches: int) -> Plan:
    program = traced(pp, dp, microbatches)
    return compile_once(program, pp=pp, dp=dp, microbatches=microbatches, zero=2).plan


def measure(case: Case, plan: Plan) -> tuple[int, dict[str, float], float]:
    """Tasks, CPU seconds per part, and seconds on the clock of all but the explanation."""
    found = machine(case.machine)
    running = 0.0

    def timed(begins: Sequence[float]) -> Times:
        nonlocal running
        start = time.process_time()
        times = engine.run(begins)
        running += time.process_time() - start
        return times

    begun, clock = time.process_time(), time.perf_counter()
    with no_collections():
        world = (expanded if case.by_rank else compressed)(plan)
        simulation = Simulation(world, found, MachineCosts(plan, found))
        prepared = time.process_time()
        engine = simulation.engine
        simulation.engine = SimpleNamespace(run=timed)  # type: ignore[assignment]
        timeline = simulation.timeline(case.steps)
    made, clock = time.process_time(), time.perf_counter() - clock
    step_text(plan, Causes(plan, timeline))
    parts = {
        "prepare": prepared - begun,
        "run": running,
        "timeline": made - prepared - running,
        "explain": time.process_time() - made,
    }
    return timeline.num_spans, parts, clock


def row(case: Case, spans: int, parts: dict[str, float], clock: float) -> str:
    seconds = sum(parts.values()) - parts["explain"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    each = " | ".join(f"{part:.2f} s" for part in parts.values())
    return (
        f"| {case.pp * case.dp:,} | {'rank' if case.by_rank else 'class'} | {case.machine} "
        f"| {case.steps} | {spans:,} | {each} | {seconds:.2f} s ({clock:.2f} s) "
        f"| {seconds / spans * 1e6:.1f} µs | {peak:,.0f} MiB |"
    )


HEAD = (
    "| ranks | by | machine | steps | tasks | prepare | run | timeline | explain "
    "| simulate (on the clock) | a task | peak memory |\n" + "|---" * 12 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, default=len(CASES), metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD)
    for case in CASES[: options.only]:
        plan = compiled(case.pp, case.dp, case.microbatches)
        print(row(case, *measure(case, plan)), flush=True)


if __name__ == "__main__":
    main()
