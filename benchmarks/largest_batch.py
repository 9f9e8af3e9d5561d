"""The largest batch under one memory limit: pipelines with ZeRO 2 and 3 beside pipelines with FSDP2.

Two stages on two data ranks each, 1F1B, float32 masters and reductions on both sides, the model and
the processes of peers.py. A side's batch grows by the rows of a microbatch until its fullest rank would
hold more than `--limit`. Piper knows that from plans; the largest that fits is run, and its measured
peak has to fit, too. Of a peer the peak is measured, at a few sizes along the line through the first
two. Both sides are run with layers that backwards compute again, of which only inputs are kept, and
with nothing computed again; `chosen` is Piper with the limit alone. With `--limit least` the limit is
the least, in tenths of a GiB, under which the first of the sides trains one row at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from initial_weights import weights_file
from peer_sides import Kept, Side, tell
from peers import BUCKET, LARGE, PRECISION, RANKS, SMALL, Options, traced
from shared_gpu import PiperSide, TorchSide
from transformer import Sizes

import piper
from piper.api.job import Job
from piper.errors import CheckError
from piper.ir.form.byte_sizes import parse_size, show_size

KEEPS = {"computed again": "nothing", "all kept": "everything", "chosen": None}
PEERS = {
    f"PP2 x FSDP2, {resharding}, {how}": name + ("_again" if keep == "nothing" else "")
    for how, keep in KEEPS.items()
    if keep is not None
    for resharding, name in (("not resharding", "pp_fsdp2_whole"), ("resharding", "pp_fsdp2"))
}
OURS = {
    f"Piper PP2 x ZeRO-{zero}, {how}": (zero, keep)
    for how, keep in KEEPS.items()
    for zero in (2, 3)
}


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    device: str
    limit: int
    most: int  # rows of a microbatch at most
    steps: int

    def sizes(self, rows: int) -> Sizes:
        base = LARGE if self.device == "cuda" else SMALL
        return replace(base, rows=rows, dtype="float32")

    def options(self, rows: int) -> Options:
        return Options(self.device, self.steps, 1, False, 1, self.sizes(rows))


def lower(zero: int, keep: Any, rows: int, limit: int, asked: Asked) -> Job | None:
    """Piper's plan for a limit; None if it does not fit."""
    sizes, cuda = asked.sizes(rows), asked.device == "cuda"
    strategy = piper.strategies.parallel(
        pp=2, dp=2, zero=zero, microbatches=sizes.microbatches // 2, schedule="1f1b",
        recompute=keep, bucket_size=BUCKET if cuda else None,
    )  # fmt: skip
    try:
        return traced(sizes, 2).apply(strategy).lower(
            optimizer=piper.adamw(lr=1e-4, **({"fused": True} if cuda else {})),
            device=asked.device, precision=PRECISION["masters"] if cuda else None,
            memory_limit=limit, weights=weights_file(sizes),
        )  # fmt: skip
    except CheckError:
        return None


def most_that(fits: Callable[[int], bool], most: int) -> int:
    """The largest number that fits, by doubling and halving; 0 if not even 1 does."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def along_a_line(peak: Callable[[int], float], limit: float, most: int) -> int:
    """The largest number whose peak is within a limit, where peaks lie about on a line."""
    one, two = peak(1), peak(2)
    if one > limit:
        return 0
    slope = two - one
    guess = most if slope <= 0 else int((limit - one) / slope) + 1
    guess = max(1, min(most, guess))
    while guess > 1 and peak(guess) > limit:
        guess -= 1
    while guess < most and peak(guess + 1) <= limit:
        guess += 1
    return guess


def run(side: Side, asked: Asked) -> dict[str, Any]:
    """Time and peak of a side that is warm."""
    side.steps(2)
    times = side.steps(asked.steps)[1]
    return {"ms": statistics.median(times), "peak": max(side.peaks())}


def measure_peer(name: str, asked: Asked, kept: Kept) -> dict[str, Any]:
    runs: dict[int, dict[str, Any]] = {}

    def peak(rows: int) -> float:
        if rows not in runs:
            kept.use(RANKS, asked.sizes(rows), weights_file(asked.sizes(rows)))
            side = TorchSide(kept.torch(), f"{name}@masters", asked.options(rows))
            runs[rows] = run(side, asked)
            side.close()
            tell(f"{name}, {rows} rows: {show_size(int(runs[rows]['peak']))}")
        return float(runs[rows]["peak"])

    if not asked.limit:
        return {"peak": peak(1)}
    rows = along_a_line(peak, asked.limit, asked.most)
    return {"rows": rows, **runs.get(rows, {})}


def measure_piper(zero: int, keep: Any, asked: Asked, kept: Kept) -> dict[str, Any]:
    """The largest batch whose measured peak fits. What kernels take for themselves is in no plan: where
    a step takes more than the limit, the plan's limit falls by as much."""
    limit = asked.limit
    while True:
        found = _planned(zero, keep, limit, asked, kept)
        above = found.get("peak", 0) - asked.limit
        if above <= 0:
            return found
        tell(f"ZeRO-{zero}, {found['rows']} rows: {show_size(int(above))} above the limit")
        limit = min(limit, found["planned"]) - int(above)


def _planned(zero: int, keep: Any, limit: int, asked: Asked, kept: Kept) -> dict[str, Any]:
    """The largest batch whose plan fits, run."""
    jobs: dict[int, Job | None] = {}

    def fits(rows: int) -> bool:
        if rows not in jobs:
            jobs[rows] = lower(zero, keep, rows, limit, asked)
            tell(f"ZeRO-{zero}, {rows} rows: {'fits' if jobs[rows] else 'does not fit'}")
        return jobs[rows] is not None

    rows = most_that(fits, asked.most)
    job = jobs.get(rows)
    if job is None:
        return {"rows": 0}
    kept.use(RANKS, asked.sizes(rows), weights_file(asked.sizes(rows)))
    side = PiperSide(job, kept.pool(), asked.options(rows))
    found = run(side, asked)
    side.close()
    planned = max(peak.total for peak in job.report.peaks)
    return {"rows": rows, **found, "planned": planned, "summary": job.summary()}


HEAD = "| side | largest batch | tokens/s | peak of a rank | planned |\n|---|---|---|---|---|"


def line(name: str, found: dict[str, Any], asked: Asked) -> str:
    if not found["rows"]:
        return f"| {name} | does not fit | | | |"
    if asked.device == "cpu" and "planned" not in found:
        return f"| {name} | not measured: no peaks on a CPU | | | |"
    sizes = asked.sizes(found["rows"])
    batch = sizes.microbatches * sizes.rows
    rate = 1e3 * batch * sizes.length / found["ms"]
    planned = show_size(found["planned"]) if "planned" in found else ""
    return f"| {name} | {batch} | {rate:,.0f} | {show_size(int(found['peak']))} | {planned} |"


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", default="12GiB", help="of each rank")
    parser.add_argument("--most", type=int, default=64, help="rows of a microbatch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sides", default="", help="parts of their names, as in A,B")
    parser.add_argument("--json", default="largest-batch.json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    limit = 0 if given.limit == "least" else parse_size(given.limit)
    asked = Asked(given.device, limit, given.most, given.steps)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    found: dict[str, Any] = {"torch": torch.__version__, "device": name}
    rows: dict[str, Any] = {}
    chosen = [s for s in (*PEERS, *OURS) if any(part in s for part in given.sides.split(","))]
    with Kept(asked.device) as kept:
        if not asked.limit:
            tenths = math.ceil(measure_peer(PEERS[chosen[0]], asked, kept)["peak"] * 10 / 2**30)
            asked = replace(asked, limit=tenths * 2**30 // 10)
        found["limit"] = asked.limit
        for label in chosen:
            if label in PEERS:
                rows[label] = measure_peer(PEERS[label], asked, kept)
            else:
                rows[label] = measure_piper(*OURS[label], asked, kept)
            Path(given.json).write_text(json.dumps(found | {"rows": rows}, indent=1))
            print(line(label, rows[label], asked), flush=True)
    print(f"torch {found['torch']}, {found['device']}, at most {show_size(asked.limit)} a rank\n")
    print(HEAD)
    for label, row in rows.items():
        print(line(label, row, asked))


if __name__ == "__main__":
    main()
