"""What Piper plans for the rows of peers.py, without running any: peaks, and bytes that ranks send for
gathers and reductions; as it is, and within the memory that the fastest peer of a run took.

    python benchmarks/planned_peers.py benchmarks/results/peers_gpu.json

Plans are made for a CPU, whose attention saves about as much as a GPU's.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from peers import PRECISION, ROWS, Options, Row, options_of, traced

import piper
from piper.api.job import Job
from piper.compiler.cadence_costs import moved
from piper.errors import PiperError
from piper.ir.form.byte_sizes import show_size


def lower(row: Row, regime: str, limit: int | None) -> Job:
    options = options_of(row, regime, Options("cuda", 1, 1, False, 1))
    program = traced(options.sizes, row.stages).apply(piper.strategies.parallel(**row.strategy))
    return program.lower(
        optimizer=piper.adamw(lr=1e-4), precision=PRECISION[regime], memory_limit=limit
    )


def cells(row: Row, regime: str, limit: int | None) -> str:
    try:
        job = lower(row, regime, limit)
    except PiperError as error:
        return f"{str(error).splitlines()[0]} | |"
    peak = max(peak.total for peak in job.report.peaks)
    return f"{show_size(peak)} | {show_size(int(moved(job.plan)))} |"


def fastest(found: dict[str, Any]) -> dict[str, Any] | None:
    peers = [side for name, side in found["sides"].items() if "@" in name and side["ms"]]
    return min(peers, key=lambda side: statistics.median(side["ms"]), default=None)


def main() -> None:
    print("| row | fastest peer's peak | Piper's | sends | within the peer's | sends |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:]:
        for found in json.loads(Path(name).read_text())["rows"].values():
            row = next(row for row in ROWS if row.name == found["row"])
            peer = fastest(found)
            if peer is None:
                continue
            own = cells(row, found["regime"], None)
            within = cells(row, found["regime"], int(peer["peak"]))
            print(f"| {row.name} | {show_size(int(peer['peak']))} | {own} {within}", flush=True)


if __name__ == "__main__":
    main()
