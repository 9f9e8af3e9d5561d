"""What checkpoints cost: seconds for which training waits, beside those of a step, and bytes on disk.

The demo's model trains on local processes, saving every so many steps; with `--gpu` the dense model of
1.1 billion parameters, on four NCCL ranks that share one card (`--gpu --small` is the same code on
CPUs). Prints a table; with `--write` also into docs/checkpoint_cost.md, where each has its own.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pages import write_section
from shared_gpu import LARGE, RANKS, SMALL
from torch_ranks import batches
from transformer import Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.stored.folders import found_in
from piper.strategies import parallel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
moe_lm: Any = importlib.import_module("moe_lm")
DOCS = ROOT / "docs" / "checkpoint_cost.md"
DEMO: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2, "microbatches": 4},
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3, "microbatches": 4},
    "the demo's: pp 2, dp 2, ep 2, ZeRO-2, DualPipeV": {
        "pp": 2,
        "dp": 2,
        "ep": 2,
        "zero": 2,
        "schedule": "dualpipev",
        "microbatches": 4,
    },
}
GPU: dict[str, dict[str, Any]] = {
    "pp 4, 1F1B": {"pp": 4, "microbatches": 8},
    "pp 2, dp 2, ZeRO-1, 1F1B": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4},
}


class Seen:
    """A callback that keeps when steps ended and what is said of checkpoints."""

    def __init__(self) -> None:
        self.steps: dict[int, float] = {}
        self.ends: list[float] = []
        self.saves: list[dict[str, Any]] = []

    def on_step(self, record: Any) -> None:
        self.steps[record.step] = record.ms
        self.ends.append(time.perf_counter())

    def on_checkpoint(self, facts: dict[str, Any]) -> None:
        self.saves.append(facts)


def lower_demo(name: str, options: Any) -> tuple[Job, Any]:
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    job = program.apply(parallel(**DEMO[name])).lower(optimizer=moe_lm.optimizer, clip=1.0)
    return job, moe_lm.data


def lower_gpu(name: str, options: Any) -> tuple[Job, Any]:
    sizes, device = (SMALL, "cpu") if options.small else (LARGE, "cuda")
    degrees = GPU[name]
    program = piper.trace(lambda: Transformer(sizes, degrees["pp"]), make_batch(sizes), step)
    optimizer = piper.adamw(lr=1e-4, **({} if options.small else {"fused": True}))
    job = program.apply(parallel(schedule="1f1b", **degrees)).lower(
        optimizer=optimizer, device=device
    )
    given = batches(sizes)
    return job, [given[number % len(given)] for number in range(options.steps)]


def measure(name: str, options: Any) -> dict[str, Any]:
    job, data = (lower_gpu if options.gpu else lower_demo)(name, options)
    shared = {"ranks_per_gpu": RANKS} if job.plan.device == "cuda" else {}
    seen = Seen()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        piper.train(
            job,
            data,
            steps=options.steps,
            launch="local",
            log="none",
            callbacks=[seen],
            checkpoint=folder,
            checkpoint_every=options.every,
            keep=1,
            **shared,
        )
        path, manifest = found_in(folder)
        state = manifest.state(path)
        held = sum(
            math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
            for stored in (state.model, state.averages, *state.optimizer.values())
            for tensor in stored.values()
        )
        disk = sum(file.stat().st_size for file in Path(path).glob("*.distcp"))
    between = [1e3 * (end - begin) for begin, end in zip(seen.ends, seen.ends[1:], strict=False)]
    usual = statistics.median(seen.steps.values())
    quiet = statistics.mean(between[5 : options.every - 1])
    during = between[options.every - 1 :]
    return {
        "name": name, "usual": usual, "held": held, "disk": disk,
        "waited": [1e3 * save["seconds"] for save in seen.saves],
        "longer": statistics.mean(during) / quiet - 1,
    }  # fmt: skip


def row(case: dict[str, Any], gpu: bool) -> str:
    waited = statistics.median(case["waited"])
    longer = f"| {case['longer']:+.1%} " if gpu else ""
    return (
        f"| {case['name']} | {case['usual']:.1f} ms | {waited:.1f} ms ({max(case['waited']):.1f}) "
        f"| {waited / (100 * case['usual']):.2%} {longer}"
        f"| {case['held'] / 2**20:.2f} MiB | {case['disk'] / 2**20:.2f} MiB |"
    )


def head(every: int, gpu: bool) -> str:
    """Steps of ranks that share CPU cores drift too much to compare early ones with later ones."""
    longer = f"| steps with a save every {every}, beside none " if gpu else ""
    return (
        "| strategy | step | training waits for a save (longest) | of a step, saving every 100 "
        f"{longer}| state | files |\n{'|---' * (7 if gpu else 6)}|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="the 1.1B model on ranks of one card")
    parser.add_argument("--small", action="store_true", help="that one, but small and on CPUs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--folder", help="where to save; without it, the system's")
    parser.add_argument("--write", action="store_true", help="also into docs/checkpoint_cost.md")
    options = parser.parse_args()
    lines = [head(options.every, options.gpu)]
    print(lines[0])
    for name in GPU if options.gpu else DEMO:
        lines.append(row(measure(name, options), options.gpu))
        print(lines[-1], flush=True)
    if options.write:
        where = "1.1 billion parameters, four ranks on one GPU"
        write_section(DOCS, where if options.gpu else "The demo's model on local processes", lines)


if __name__ == "__main__":
    main()
