"""What checkpoints cost: seconds for which training waits, beside those of a step, and bytes on disk.

The demo's model trains on local processes, saving every so many steps. Prints a table; with `--write`
also into docs/checkpoint_cost.md.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import piper
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.folders import found_in
from piper.strategies import parallel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
moe_lm: Any = importlib.import_module("moe_lm")
DOCS = ROOT / "docs" / "checkpoint_cost.md"
STRATEGIES: dict[str, dict[str, Any]] = {
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


class Seen:
    """A callback that keeps the milliseconds of steps and what is said of checkpoints."""

    def __init__(self) -> None:
        self.steps: dict[int, float] = {}
        self.saves: list[dict[str, Any]] = []

    def on_step(self, record: Any) -> None:
        self.steps[record.step] = record.ms

    def on_checkpoint(self, facts: dict[str, Any]) -> None:
        self.saves.append(facts)


def measure(name: str, steps: int, every: int, device: str) -> dict[str, Any]:
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    strategy = parallel(**STRATEGIES[name])
    job = program.apply(strategy).lower(optimizer=moe_lm.optimizer, clip=1.0, device=device)
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        piper.train(
            job,
            moe_lm.data,
            steps=steps,
            launch="local",
            log="none",
            callbacks=[seen],
            checkpoint=folder,
            checkpoint_every=every,
            keep=1,
        )
        path, manifest = found_in(folder)
        state = manifest.state(path)
        held = sum(
            PieceReader(stored).tensor(key).nbytes
            for stored in (state.model, state.averages, *state.optimizer.values())
            for key in stored
        )
        disk = sum(file.stat().st_size for file in Path(path).glob("*.distcp"))
    usual = statistics.median(seen.steps.values())
    waited = statistics.median(1e3 * save["seconds"] for save in seen.saves)
    return {
        "name": name, "usual": usual, "waited": waited,
        "held": held, "disk": disk, "saves": len(seen.saves),
    }  # fmt: skip


def row(case: dict[str, Any]) -> str:
    share = case["waited"] / (100 * case["usual"])
    return (
        f"| {case['name']} | {case['usual']:.1f} ms | {case['waited']:.1f} ms | {share:.2%} "
        f"| {case['held'] / 2**20:.2f} MiB | {case['disk'] / 2**20:.2f} MiB |"
    )


HEAD = (
    "| strategy | step | training waits for a save | of a step, saving every 100 | state | files |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="also into docs/checkpoint_cost.md")
    options = parser.parse_args()
    lines = [HEAD]
    print(HEAD)
    for name in STRATEGIES:
        lines.append(row(measure(name, options.steps, options.every, options.device)))
        print(lines[-1], flush=True)
    if options.write:
        DOCS.write_text(
            "# What checkpoints cost\n\nMade by `python benchmarks/checkpointing.py --write` with torch "
            f"{torch.__version__}: the demo's model on\nlocal processes, which share the machine's "
            "cores with the writing. Medians; the fourth column\nis the wait over the time of 100 "
            "steps.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
