"""What Piper plans for the rows of peers.py, without running any: peaks, bytes that ranks send for
gathers and reductions, simulated steps and how much of all_to_all they hide; as it is, and within the
memory that the fastest peer of a run took. `--finer 2` takes twice as many microbatches, half as large.

    python benchmarks/planned_peers.py benchmarks/results/peers_gpu.json \\
        --machine benchmarks/results/machine_gpu.json --rows TP

Plans are made for a CPU, whose attention saves about as much as a GPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer_sides import hidden
from peers import PRECISION, Options, Row, chosen, options_of, traced

import piper
from piper.api.job import Job
from piper.compiler.cadence_costs import moved
from piper.errors import PiperError
from piper.insight.exposed import exposed
from piper.ir.form.byte_sizes import show_size
from piper.observe.meetings import Meetings


def lower(row: Row, regime: str, machine: str, limit: int | None) -> Job:
    """As peers.py does, but for a CPU."""
    options = options_of(row, regime, Options("cuda", 1, 1, False, 1))
    program = traced(options.sizes, row.stages).apply(piper.strategies.parallel(**row.strategy))
    return program.lower(
        optimizer=piper.adamw(lr=1e-4),
        precision=PRECISION[regime],
        memory_limit=limit,
        machine=machine,
    )


def cells(row: Row, regime: str, machine: str, limit: int | None) -> str:
    try:
        job = lower(row, regime, machine, limit)
    except PiperError as error:
        return f"{str(error).splitlines()[0]} | | |"
    peak = max(peak.total for peak in job.report.peaks)
    step = job.simulate(machine, steps=1)
    rows = [each for each in exposed(Meetings(step, 0)) if each.kind == "all_to_all"]
    hides = f", hides {hidden(rows):.0%}" if rows else ""
    sends = show_size(int(moved(job.plan)))
    return f"{show_size(peak)} | {sends} | {1e3 * step.step_seconds[0]:.0f} ms{hides} |"


def finer(row: Row, times: int) -> Row:
    microbatches = times * row.strategy["microbatches"]
    return replace(row, strategy=row.strategy | {"microbatches": microbatches})


def fastest(found: dict[str, Any]) -> dict[str, Any] | None:
    peers = [side for name, side in found["sides"].items() if "@" in name and side["ms"]]
    return min(peers, key=lambda side: statistics.median(side["ms"]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="of peers.py")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--rows", default="", help="names or parts of them, as in A,B")
    parser.add_argument("--finer", type=int, default=1, help="times as many microbatches")
    asked = parser.parse_args()
    rows = {row.name: finer(row, asked.finer) for row in chosen(asked.rows)}
    print(
        "| row | fastest peer's peak | Piper's | sends | step | within the peer's | sends | step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.files:
        for found in json.loads(Path(name).read_text())["rows"].values():
            row, peer = rows.get(found["row"]), fastest(found)
            if row is None or peer is None:
                continue
            own = cells(row, found["regime"], asked.machine, None)
            within = cells(row, found["regime"], asked.machine, int(peer["peak"]))
            peak, label = show_size(int(peer["peak"])), f"{row.name}, {found['regime']}"
            print(f"| {label} | {peak} | {own} {within}", flush=True)


if __name__ == "__main__":
    main()
