"""Scale on paper: mixtures of 235 and 671 billion parameters on 256 to 16,384 GPUs, by strategy.

A case is a model, a number of GPUs, a global batch and a strategy. The model is traced on fake tensors,
lowered, proved, and its plan simulated on H100 nodes of 8: nothing trains. A run leaves out the cases
that its file has, and starts none after `--seconds`: call it again to go on. `--page` writes
docs/scale.md and its pictures from the files of all models.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from scale_models import LENGTH, SHAPES, Shape, step

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.cost.hardware import peak_flops
from piper.cost.presets import machine
from piper.errors import PiperError
from piper.insight.use_of_time import length, union
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Timeline
from piper.sim.simulate import simulate
from piper.strategies import parallel

RESULTS = Path(__file__).parent / "results"
STEPS = 3  # simulated; the last is between others, as most are
H100 = machine("h100")
# The same machine where a collective waits for one message only, however many ranks it has.
DIRECT = msgspec.structs.replace(
    H100,
    node=msgspec.structs.replace(H100.node, rounds=False),
    network=msgspec.structs.replace(H100.network, rounds=False),
)
PEAK = peak_flops(H100.name, "bfloat16") or 0.0


@dataclass(frozen=True)
class Case:
    """`degrees` are what `parallel` is given, but for the data ranks and microbatches, which follow from
    GPUs and batch: each microbatch is one sequence."""

    model: str
    gpus: int
    batch: int  # sequences
    name: str
    degrees: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.gpus} GPUs, {self.name}"

    def strategy(self) -> dict[str, Any]:
        degrees = {"zero": 1, "recompute": "nothing", **self.degrees}
        dp = self.gpus // (degrees.get("pp", 1) * degrees.get("tp", 1))
        return {**degrees, "dp": dp, "microbatches": max(1, self.batch // dp)}


# GPUs and sequences in a step: 16.8 million tokens, or 2.1 million.
SIZES = ((2048, 4096), (16384, 4096), (4096, 4096), (256, 512))


def _cases(model: str, gpus: int, batch: int) -> Iterator[Case]:
    """Experts are shared inside of a node (EP8), or as widely as published for DeepSeek-V3 (EP64)."""
    pp, wide = (8, 32) if model == "qwen3" else (16, 64)
    named: dict[str, dict[str, Any]] = {
        "1F1B": {"schedule": "1f1b"},
        "interleaved 1F1B": {"schedule": "interleaved_1f1b"},
        "ZBV": {"schedule": "zbv"},
        "DualPipeV": {"schedule": "dualpipev"},
    }
    if gpus == 256 and model == "deepseek":
        wide = 16  # data ranks of a stage
    if gpus <= 2048:
        named["1F1B, rows kept"] = {"schedule": "1f1b", "recompute": "pieces"}
        named[f"DualPipeV, EP{wide}"] = {"schedule": "dualpipev", "ep": wide}
    if gpus == 2048 and model == "deepseek":
        named["DualPipe, EP64"] = {"schedule": "dualpipe", "ep": wide}
    if gpus > 2048:
        named["ZBV, half the pipeline"] = {"schedule": "zbv", "pp": pp // 2}
    if gpus <= batch:
        named["no pipeline, ZeRO-3"] = {"pp": 1, "zero": 3}
    if gpus == 256:
        named[f"V-Half, EP{wide}"] = {"schedule": "v_half", "ep": wide}
        named[f"V-Min, EP{wide}"] = {"schedule": "v_min", "ep": wide}
    if gpus == 16384:
        tensors = {"tp": 4, "sp": True}
        named["1F1B, TP4, EP2"] = {"schedule": "1f1b", "ep": 2, **tensors}
        if model == "qwen3":
            named["ZBV, TP4, EP2"] = {"schedule": "zbv", "ep": 2, **tensors}
            named["no pipeline, ZeRO-3, TP4, EP2"] = {"pp": 1, "zero": 3, "ep": 2, **tensors}
    for name, degrees in named.items():
        yield Case(model, gpus, batch, name, {"pp": pp, "ep": 8, **degrees})


CASES = tuple(case for model in SHAPES for size in SIZES for case in _cases(model, *size))


def peak_memory() -> float:
    """Of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def traced(shape: Shape, batch: int) -> Program:
    tokens = torch.zeros(batch, shape.length, dtype=torch.int64)
    return piper.trace(shape.make, {"input_ids": tokens, "labels": tokens}, step)


def measure(case: Case, program: Program, shape: Shape) -> dict[str, Any]:
    """What a case's plan would take, and what making it took."""
    strategy = case.strategy()
    found: dict[str, Any] = {
        "model": case.model, "gpus": case.gpus, "batch": case.batch, "name": case.name,
        "strategy": strategy, "tokens": case.batch * shape.length,
        "flops_by_hand": shape.flops_by_hand(case.batch * shape.length),
    }  # fmt: skip
    start = time.process_time()
    try:
        job = program.apply(parallel(**strategy)).lower(
            optimizer=piper.adamw(lr=1e-4), precision="bf16", machine=H100
        )
    except PiperError as error:
        # Behind its first line are places in files of this machine.
        return {**found, "refused": str(error).partition("\n")[0]}
    lowered = time.process_time()
    timeline = simulate(job.plan, H100, steps=STEPS)
    simulated = time.process_time()
    direct = simulate(job.plan, DIRECT, steps=STEPS)
    return {
        **found,
        **of_plan(job),
        **of_timeline(timeline, job.plan.flops / case.gpus / PEAK),
        "direct_seconds": period(direct),
        "capture_s": job.seconds.get("refine", 0.0),  # on the clock: recordings and chunks
        "lower_s": lowered - start,
        "simulate_s": simulated - lowered,
        "peak_gib": peak_memory(),
    }


def of_plan(job: Job) -> dict[str, Any]:
    fullest = max(job.report.peaks, key=lambda peak: peak.total)
    return {
        "plan": job.plan.content_hash(),
        "mesh": str(job.plan.mesh),
        "flops": job.plan.flops,
        "nodes": len(job.graph.nodes),
        "tasks": sum(len(found.tasks) for found in job.plan.classes),
        "bytes": fullest.total,
        "bytes_by_category": fullest.by_category,
    }


def period(timeline: Timeline) -> float:
    """From the end of a step to the end of the next."""
    (_, before), (_, after) = timeline.steps[-2:]
    return after - before


def of_timeline(timeline: Timeline, least: float) -> dict[str, Any]:
    """The seconds of a step, and the shares of the mean rank. `least` are the seconds that its products
    take at the peak of the device."""
    seconds = period(timeline)
    meetings = Meetings(timeline, len(timeline.steps) - 1)
    sums = dict.fromkeys(("computing", "exposed", "exchange", "exchange_hidden"), 0.0)
    ranks = sum(len(track.ranks) for track in timeline.tracks)
    for number, track in enumerate(timeline.tracks):
        for name, value in _track_seconds(meetings, number).items():
            sums[name] += value * len(track.ranks) / ranks
    computing, exposed = sums["computing"] / seconds, sums["exposed"] / seconds
    return {
        "seconds": seconds,
        "first_seconds": timeline.steps[0][1] - timeline.steps[0][0],
        "mfu": least / seconds,
        "computing": computing,
        "exposed": exposed,
        "bubble": 1.0 - computing - exposed,
        "exchange_s": sums["exchange"],
        "exchange_hidden": sums["exchange_hidden"] / sums["exchange"] if sums["exchange"] else None,
    }


def _track_seconds(meetings: Meetings, number: int) -> dict[str, float]:
    """Of a rank of a track: computing; moving data with nothing computed beside it; exchanging rows with
    experts, and the part of that beside computation."""
    track = meetings.timeline.tracks[number]
    busy, moving, exchanging = [], [], []
    for span in meetings.spans[number]:
        label = track.labels[track.which[span]]
        if not label.communicates:
            busy.append((track.start[span], track.end[span]))
            continue
        place = Place(number, span)
        time_of = meetings.began(place), meetings.ended(place)
        moving.append(time_of)
        if label.kind == "all_to_all":
            exchanging.append(time_of)
    computes, exchanges = union(busy), union(exchanging)
    computing, exchange = length(computes), length(exchanges)
    return {
        "computing": computing,
        "exposed": length(union([*computes, *union(moving)])) - computing,
        "exchange": exchange,
        "exchange_hidden": computing + exchange - length(union([*computes, *exchanges])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--gpus", type=int, action="append", help="default: all sizes")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    if options.page:
        import scale_page

        scale_page.write()
        return
    torch.set_num_threads(1)
    begin = time.monotonic()
    for model in options.model or SHAPES:
        path, shape = RESULTS / f"scale_{model}.json", SHAPES[model]()
        known = json.loads(path.read_text()) if path.exists() else {"cases": {}, "traces": {}}
        program: tuple[int, Program] | None = None
        for case in CASES:
            wanted = case.model == model and case.gpus in (options.gpus or [case.gpus])
            if not wanted or case.key in known["cases"]:
                continue
            if time.monotonic() - begin > options.seconds:
                break
            if program is None or program[0] != case.batch:
                start = time.process_time()
                program = case.batch, traced(shape, case.batch)
                known["traces"][str(case.batch)] = time.process_time() - start
            found = known["cases"][case.key] = measure(case, program[1], shape)
            known |= {"torch": torch.__version__, "machine": H100.source, "length": LENGTH}
            path.write_text(f"{json.dumps(known, indent=1)}\n")
            said = found.get("refused") or f"{found['seconds']:.2f} s, MFU {found['mfu']:.1%}"
            print(f"{model}, {case.key}: {said}", flush=True)


if __name__ == "__main__":
    main()
