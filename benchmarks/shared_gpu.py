"""Four ranks that share one GPU: Piper's schedules beside those of torch.distributed.pipelining.

Both sides train the same bf16 weights on the same microbatches with fused AdamW, over NCCL, under one
MPS daemon, in rounds one after the other; first losses must equal those of one process. Piper keeps
float32 masters and sums gradients in float32, torch has neither. Above the table: one process that owns
the whole GPU. Without a GPU, `--device cpu --small` runs the same code over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from initial_weights import weights_file
from torch_ranks import ANSWER_SECONDS, TorchRanks, batches, start
from torch_variants import SCHEDULES, num_stages
from transformer import Batch, Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.bodies.leaves import batch_leaves
from piper.runtime.launch.mps import Mps

RANKS = 4
DOCS = Path(__file__).parents[1] / "docs" / "shared_gpu.md"
LARGE = Sizes(
    width=2048, layers=16, heads=16, hidden=8192, vocabulary=32000, length=1024, microbatches=8,
    rows=4, dtype="bfloat16",
)  # fmt: skip
SMALL = Sizes(
    width=32, layers=8, heads=4, hidden=64, vocabulary=64, length=8, microbatches=8, rows=1
)  # fmt: skip
TOLERANCE = {"bfloat16": 2e-3, "float32": 1e-5}  # of the first loss, relative
LATER = (
    10  # times as much of those after it: AdamW makes much of what rounding does to small gradients
)
SPLITS = ("zbv", "dualpipev")  # torch does not compile stages whose backward is cut in two


def lower(schedule: str, options: Any) -> Job:
    fused = {"fused": True} if options.device == "cuda" else {}
    sizes = options.sizes
    strategy = piper.strategies.parallel(
        pp=RANKS, schedule=schedule, microbatches=sizes.microbatches
    )
    program = traced(sizes, num_stages(schedule, RANKS)).apply(strategy)
    return program.lower(
        optimizer=piper.adamw(lr=1e-4, **fused), device=options.device, weights=weights_file(sizes)
    )


@cache
def traced(sizes: Sizes, stages: int) -> piper.Program:
    return piper.trace(lambda: Transformer(sizes, stages), make_batch(sizes), step)


class PiperSide:
    """All that the benchmark asks of Piper's launcher."""

    def __init__(self, job: Job, pool: piper.LocalPool, options: Any) -> None:
        self.taken = 0
        self.batches = batches(options.sizes)
        self.run = job.launch(pool, compile=options.compile)

    def _batch(self) -> Batch:
        self.taken += 1
        return self.batches[(self.taken - 1) % len(self.batches)]

    def steps(self, num: int) -> tuple[list[float], list[float]]:
        losses, times = [], []
        for _ in range(num):
            begin = time.perf_counter()
            losses.append(self.run.step(self._batch()).loss)
            times.append((time.perf_counter() - begin) * 1e3)
        return losses, times

    def peaks(self) -> list[float]:
        """Peak bytes of the device per rank, since the plan was loaded."""
        return [float(found["peak"]) for found in self.run.memory()]

    def trace(self, name: str, folder: str) -> None:
        leaves = batch_leaves(self._batch())
        self.run.workers.step(leaves, trace=f"{folder}/piper_{name}")  # type: ignore[call-arg]

    def close(self) -> None:
        self.run.close()


class TorchSide:
    def __init__(self, ranks: TorchRanks, schedule: str, options: Any) -> None:
        self.ranks, self.name = ranks, schedule
        ranks.ask("memory")
        split = any(name in schedule for name in SPLITS)
        ranks.ask("make", schedule, options.compile and not split)

    def steps(self, num: int) -> tuple[list[float], list[float]]:
        return self.ranks.steps(self.name, num)

    def peaks(self) -> list[float]:
        return self.ranks.ask("memory")

    def exposed(self) -> dict[str, float]:
        """Of the rank where most is; nothing on a CPU."""
        found = [each for each in self.ranks.ask("exposed", self.name) if each]
        return max(found, key=lambda each: each["exposed_ms"], default={})

    def trace(self, name: str, folder: str) -> None:
        self.ranks.ask("trace", self.name, f"{folder}/torch_{name}")

    def close(self) -> None:
        self.ranks.ask("drop", self.name)


def measure(schedule: str, wanted: float, options: Any) -> dict[str, Any]:
    """Both sides of a schedule, in rounds, on processes of their own."""
    begin = time.perf_counter()
    job = lower(schedule, options)
    found: dict[str, Any] = {"schedule": schedule, "lower_s": time.perf_counter() - begin}
    shared = RANKS if options.device == "cuda" else 1
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(torch_ranks(options))
        start(ranks, options.sizes, weights_file(options.sizes))
        pool = piper.LocalPool(RANKS, device=options.device, ranks_per_gpu=shared)
        stack.enter_context(pool)
        sides: dict[str, PiperSide | TorchSide] = {}
        for name in ("piper", "torch"):
            begin = time.perf_counter()
            made = (
                PiperSide(job, pool, options)
                if name == "piper"
                else TorchSide(ranks, schedule, options)
            )
            stack.callback(made.close)
            sides[name] = made
            (first,), _ = made.steps(1)
            found[name] = {"start_s": time.perf_counter() - begin, "loss": first, "ms": []}
            check(f"{schedule} of {name}", first, wanted, options)
            made.steps(options.warmup - 1)
        for _ in range(options.steps):
            for name, side in sides.items():
                found[name]["ms"] += side.steps(1)[1]
        for name, side in sides.items():
            found[name]["peaks"] = side.peaks()
            if options.trace:
                side.trace(schedule, os.path.abspath(options.trace))
    return found


def check(name: str, loss: float, wanted: float, options: Any, *, step: int = 0) -> None:
    """With experts a rounding to bfloat16 may send a row to another one, whatever masters have."""
    narrow = options.sizes.experts and options.device == "cuda"
    bound = TOLERANCE["bfloat16" if narrow else options.sizes.dtype] * (LATER if step else 1)
    if not abs(loss - wanted) <= bound * abs(wanted):
        raise RuntimeError(
            f"{name}: the loss of step {step} is {loss}, one process has {wanted}; bound {bound:g}"
        )


def one_process(options: Any) -> dict[str, Any]:
    """The plain loop in one process that owns the whole GPU, eager and with --compile compiled."""
    found: dict[str, Any] = {}
    with TorchRanks(1, device=options.device) as ranks:
        start(ranks, options.sizes, weights_file(options.sizes))
        for name in ("eager", "compiled") if options.compile else ("eager",):
            ranks.ask("plain", name, name == "compiled")
            losses, _ = ranks.steps(name, options.warmup)
            _, times = ranks.steps(name, options.steps)
            found[name] = {"loss": losses[0], "ms": times, "peaks": ranks.ask("memory")}
            ranks.ask("drop", name)
    return found


@contextlib.contextmanager
def torch_ranks(
    options: Any, num: int = RANKS, *, patience: float = ANSWER_SECONDS
) -> Iterator[TorchRanks]:
    """The processes of torch's side; on a GPU each is a client of MPS and a host of its own to NCCL."""
    with contextlib.ExitStack() as stack:
        env: list[dict[str, str]] = [{} for _ in range(num)]
        if options.device == "cuda":
            mps = stack.enter_context(Mps())
            added = mps.env().keys() - os.environ.keys()
            os.environ.update(mps.env())  # so that Piper's launcher uses this daemon too
            stack.callback(lambda: [os.environ.pop(name) for name in added])
            env = [
                {**mps.env(percentage=100 / num), "NCCL_HOSTID": f"host{rank}"}
                for rank in range(num)
            ]
        made = TorchRanks(num, device=options.device, env=env, patience=patience)
        yield stack.enter_context(made)


HEAD = (
    "| schedule | Piper | torch | Piper / torch | steps of Piper | of torch | start of Piper | of torch "
    "| peak of a rank: Piper | torch |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(found: dict[str, Any]) -> str:
    mine, other = found["piper"], found["torch"]
    middle = [statistics.median(side["ms"]) for side in (mine, other)]
    spans = [f"{min(side['ms']):.0f} to {max(side['ms']):.0f}" for side in (mine, other)]
    peaks = [f"{max(side['peaks']) / 2**30:.2f} GiB" for side in (mine, other)]
    return (
        f"| {found['schedule']} | {middle[0]:.1f} ms | {middle[1]:.1f} ms | {middle[0] / middle[1]:.3f} "
        f"| {spans[0]} | {spans[1]} | {mine['start_s']:.1f} s | {other['start_s']:.1f} s "
        f"| {peaks[0]} | {peaks[1]} |"
    )


ABOUT = f"""Four NCCL ranks under MPS with a quarter of the SMs each, both sides in turn in one run.
Width {LARGE.width}, {LARGE.layers} layers, {LARGE.heads} heads, gated feed-forward {LARGE.hidden},
vocabulary {LARGE.vocabulary}, sequence {LARGE.length}, {LARGE.microbatches} microbatches of
{LARGE.rows}, bf16, fused AdamW. Every first loss equals that of one process within
{TOLERANCE["bfloat16"]:g} (relative). Times are medians of the steps. Piper keeps float32 masters and
sums gradients in float32, torch has neither; that is the memory. Torch does not compile stages whose
backward is cut in two."""


def page(files: list[str]) -> str:
    """The page of the docs, from what `--json` left."""
    parts = ["# Four ranks on one GPU", ABOUT]
    for name in files:
        with open(name) as file:
            found = json.load(file)
        alone = found["one_process"]["eager"]
        parts += [
            f"## {'Compiled' if found['compile'] else 'Eager'} bodies",
            f"torch {found['torch']}, {found['device']}. One process that owns the whole GPU: "
            f"{statistics.median(alone['ms']):.1f} ms a step, eager.",
            "\n".join([HEAD, *map(line, found["schedules"])]),
        ]
    made = "Made by `python benchmarks/shared_gpu.py --page FILES` from files of `--json`."
    return "\n\n".join([*parts, made]) + "\n"


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="which, by comma")
    parser.add_argument("--steps", type=int, default=6, help="that are measured, in turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--trace", metavar="FOLDER", help="a profiler trace per rank and side")
    parser.add_argument("--json", metavar="FILE", help="all numbers")
    parser.add_argument("--page", nargs="+", metavar="FILE", help="only make docs/shared_gpu.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny float32 model")
    options = parser.parse_args()
    options.sizes = SMALL if options.small else LARGE
    names = {"interleaved": "interleaved_1f1b"}
    options.schedules = [names.get(name, name) for name in options.schedules.split(",")]
    return options


def main() -> None:
    options = arguments()
    if options.page:
        DOCS.write_text(page(options.page))
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {'compiled' if options.compile else 'eager'} bodies")
    found: dict[str, Any] = {"torch": torch.__version__, "device": name, "compile": options.compile}
    found["one_process"] = one_process(options)
    for mode, plain in found["one_process"].items():
        print(
            f"one process, {mode}: {statistics.median(plain['ms']):.1f} ms a step, first loss "
            f"{plain['loss']:.5f}, peak {plain['peaks'][0] / 2**30:.2f} GiB"
        )
    wanted = found["one_process"]["eager"]["loss"]
    found["schedules"] = []
    print(HEAD, flush=True)
    for schedule in options.schedules:
        found["schedules"].append(measure(schedule, wanted, options))
        print(line(found["schedules"][-1]), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(found, file, indent=1)
    bound = TOLERANCE[options.sizes.dtype]
    print(f"first losses of all equal that of one process within {bound:g} (relative)")


if __name__ == "__main__":
    main()
