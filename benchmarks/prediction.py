"""Predicted against measured: what `piper simulate` says of a step after calibration, and what it takes.

On CPUs two pinned ranks train ten strategies of one dense model, and a model with experts. In every
round links are measured, and each strategy runs some steps without communication and some in earnest;
one calibration, of all rounds, predicts all strategies. With `--gpu` four NCCL ranks share one card,
with the dense model of 1.1 billion parameters. Prints a table and how well the ranking is predicted;
with `--write` also into docs/prediction.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import shared_gpu
import torch
from host_cost import RANKS, SIZES, SMALL, pin, traced
from pages import write_section
from torch_variants import num_stages
from transformer import Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.cost.machine import Curve, Machine
from piper.cost.machine_file import save_machine
from piper.observe.timeline import Timeline
from piper.observe.timeline_output import save_timeline
from piper.sim.calibration import with_rehearsals
from piper.strategies import parallel
from piper.training.profile import compared, linked, recorded

DOCS = Path(__file__).parents[1] / "docs" / "prediction.md"
PIPELINES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
EXPERTS = "experts over 2 ranks, ZeRO-1"
Case = tuple[Job, Any]  # and its batch


def cpu_cases(options: Any) -> dict[str, Case]:
    """The ten of one model, then the one with experts."""
    sizes = SMALL if options.small else SIZES
    batch = make_batch(sizes)

    def dense(name: str) -> Job:
        if name in PIPELINES:
            stages = (
                num_stages(name, RANKS)
                if name in ("interleaved_1f1b", "zbv", "dualpipev")
                else RANKS
            )
            strategy = parallel(pp=RANKS, schedule=name, microbatches=sizes.microbatches)
        else:
            stages = sizes.layers
            zero = int(name[-1])
            strategy = parallel(
                dp=RANKS, zero=zero, microbatches=sizes.microbatches // RANKS,
                reduce_every=1 if zero > 1 else None,
            )  # fmt: skip
        return traced(sizes, stages).apply(strategy).lower(optimizer=piper.adamw(lr=1e-4))

    def experts() -> Job:
        mixed = replace(sizes, experts=True)
        program = piper.trace(lambda: Transformer(mixed, sizes.layers), batch, step)
        strategy = parallel(dp=RANKS, ep=RANKS, zero=1, microbatches=sizes.microbatches // RANKS)
        return program.apply(strategy).lower(optimizer=piper.adamw(lr=1e-4), clip=1.0)

    names = (*PIPELINES, *(f"ZeRO-{level}" for level in range(4)))
    found: dict[str, Callable[[], Job]] = {name: partial(dense, name) for name in names}
    found[EXPERTS] = experts
    return {name: (make(), batch) for name, make in chosen(found, options)}


def chosen(
    makers: dict[str, Callable[[], Job]], options: Any
) -> list[tuple[str, Callable[[], Job]]]:
    return [item for item in makers.items() if not options.only or item[0] in options.only]


def gpu_cases(options: Any) -> dict[str, Case]:
    sizes = shared_gpu.SMALL if options.small else shared_gpu.LARGE
    given = argparse.Namespace(sizes=sizes, device="cpu" if options.small else "cuda")
    batch = make_batch(sizes)
    names = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
    makers: dict[str, Callable[[], Job]] = {
        name: partial(shared_gpu.lower, name, given) for name in names
    }

    def both(zero: int) -> Job:
        strategy = parallel(
            pp=2, dp=2, zero=zero, schedule="1f1b", microbatches=4,
            reduce_every=1 if zero > 1 else None,
        )  # fmt: skip
        program = shared_gpu.traced(sizes, 2).apply(strategy)
        fused = {} if options.small else {"fused": True}
        return program.lower(optimizer=piper.adamw(lr=1e-4, **fused), device=given.device)

    makers |= {f"pp 2, dp 2, ZeRO-{zero}": partial(both, zero) for zero in (1, 3)}
    return {name: (make(), batch) for name, make in chosen(makers, options)}


class Round:
    """Links, then each strategy without communication and in earnest."""

    def __init__(self, cases: dict[str, Case], pool: piper.LocalPool, options: Any) -> None:
        self.links = linked(pool, *(job.plan for job, _ in cases.values()))
        self.rehearsals, self.measured = {}, {}
        for name, (job, batch) in cases.items():
            self.rehearsals[name] = job.plan, job.rehearse(batch, pool, steps=options.steps)
            self.measured[name] = recorded(job, batch, pool, steps=options.steps)
        self.machine = with_rehearsals(self.links, *self.rehearsals.values())


def mean_links(machines: list[Machine]) -> Machine:
    """The first with the means of all that was measured of exchanges."""
    first = machines[0]
    exchanges = {}
    for kind in first.exchanges:
        curves = [machine.exchanges[kind] for machine in machines]
        points = [
            (each[0][0], statistics.fmean(seconds for _, seconds in each))
            for each in zip(*(curve.points for curve in curves), strict=True)
        ]
        exchanges[kind] = Curve(points, statistics.fmean(curve.share for curve in curves))
    means = {
        name: statistics.fmean(getattr(machine, name) for machine in machines)
        for name in ("exchange", "lanes")
    }
    return msgspec.structs.replace(first, exchanges=exchanges, **means)


def summed_up(name: str, job: Job, rounds: list[Round], machine: Machine) -> dict[str, Any]:
    every = [compared(job, each.measured[name], each.machine) for each in rounds]
    last = compared(job, rounds[-1].measured[name], machine)
    steps = [seconds for each in rounds for seconds in each.measured[name].step_seconds]
    return {
        "predicted": last.predicted_seconds,
        "measured": statistics.median(steps),
        "errors": sorted(each.error for each in every),
        "furthest": last.kinds[0],
    }


def keep(folder: str, name: str, job: Job, measured: Timeline, machine: Machine) -> None:
    kept = Path(folder) / re.sub(r"\W+", "_", name)
    save_machine(machine, f"{kept}.machine.json")
    save_timeline(measured, f"{kept}.timeline")
    job.save(f"{kept}.plan")


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) for i in range(len(values))]


def rank_correlation(found: list[dict[str, Any]]) -> float:
    """Spearman's: 1 if the strategies are in the right order."""
    predicted, measured = (ranks_of([each[k] for each in found]) for k in ("predicted", "measured"))
    num = len(found)
    apart = sum((a - b) ** 2 for a, b in zip(predicted, measured, strict=True))
    return 1 - 6 * apart / (num * (num * num - 1))


HEAD = (
    "| strategy | measured | predicted | error | of single rounds | furthest apart: kind, predicted, "
    "measured |\n|---|---|---|---|---|---|"
)


def row(name: str, found: dict[str, Any]) -> str:
    error = found["predicted"] / found["measured"] - 1
    far = found["furthest"]
    return (
        f"| {name} | {found['measured'] * 1e3:.1f} ms | {found['predicted'] * 1e3:.1f} ms "
        f"| {error:+.1%} | {found['errors'][0]:+.1%} to {found['errors'][-1]:+.1%} "
        f"| {far.kind}, {far.predicted * 1e3:.1f}, {far.measured * 1e3:.1f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="four NCCL ranks on one card")
    parser.add_argument("--small", action="store_true", help="tiny models, on CPUs")
    parser.add_argument("--only", nargs="*", help="these strategies")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", metavar="FOLDER", help="of machines, plans and recordings")
    parser.add_argument("--write", action="store_true", help="also into docs/prediction.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = (gpu_cases if options.gpu else cpu_cases)(options)
    device = "cuda" if options.gpu and not options.small else "cpu"
    num = shared_gpu.RANKS if options.gpu else RANKS
    shared = {"ranks_per_gpu": num} if device == "cuda" else {}
    lines, found = [HEAD], {}
    print(HEAD)
    with piper.LocalPool(num, device=device, **shared) as pool:
        if device == "cpu":
            pin(pool)
        rounds = [Round(cases, pool, options) for _ in range(options.rounds)]
    every = [rehearsal for each in rounds for rehearsal in each.rehearsals.values()]
    machine = with_rehearsals(mean_links([each.links for each in rounds]), *every)
    for name, (job, _) in cases.items():
        found[name] = summed_up(name, job, rounds, machine)
        lines.append(row(name, found[name]))
        print(lines[-1], flush=True)
        if options.keep:
            keep(options.keep, name, job, rounds[-1].measured[name], machine)
    ranked = [each for name, each in found.items() if name != EXPERTS]
    if len(ranked) > 2:
        lines += [
            "",
            f"Rank correlation of {len(ranked)} strategies: {rank_correlation(ranked):.2f}.",
        ]
        print(lines[-1])
    if options.write:
        where = "four ranks on one GPU" if options.gpu else "two pinned CPU ranks"
        rounds_made = f"{options.rounds} rounds of {options.steps} steps."
        write_section(DOCS, where[0].upper() + where[1:], [rounds_made, "", *lines])


if __name__ == "__main__":
    main()
