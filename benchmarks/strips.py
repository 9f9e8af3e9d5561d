"""What tensor parallelism in strips would gain on a node of 8 H100s: simulated steps of a few layers.

Layers of the width of a Llama 3 70B, 4,096 tokens a row, cut over all 8 ranks with sequences. Nothing
runs: plans are made on fake tensors. A collective waits for each hop of a ring, or for one message only
("one latency"); a real one lies between.

    python benchmarks/strips.py
"""

from __future__ import annotations

import llama
import msgspec
import torch

import piper
from piper.cost.machine import Machine
from piper.cost.presets import machine
from piper.sim.simulate import simulate
from piper.strategies import parallel

RANKS, LAYERS, LENGTH = 8, 2, 4096
ROWS = (1, 2, 4, 8)
STRIPS = (1, 2, 4)
STEPS = 3  # simulated; the last is between others, as most are

H100 = machine("h100")
DIRECT = msgspec.structs.replace(H100, node=msgspec.structs.replace(H100.node, rounds=False))


def widen() -> None:
    llama.LAYERS, llama.VOCABULARY = LAYERS, 32000
    llama.WIDTH, llama.HIDDEN, llama.HEADS = 8192, 28672, 64


def traced(rows: int) -> piper.Program:
    return piper.trace(llama.Llama, llama.batch(rows, LENGTH), llama.step)


def lowered(program: piper.Program, strips: int) -> piper.Job:
    strategy = parallel(tp=RANKS, sp=True, strips=strips)
    optimizer = piper.adamw(lr=1e-4)
    return program.apply(strategy).lower(optimizer=optimizer, precision="bf16", machine=H100)


def period(job: piper.Job, on: Machine) -> float:
    """From the end of a step to the end of the next, in ms."""
    (_, before), (_, after) = simulate(job.plan, on, steps=STEPS).steps[-2:]
    return 1e3 * (after - before)


def main() -> None:
    torch.set_num_threads(1)
    widen()
    print("| rows | " + " | ".join(f"strips={n} | one latency" for n in STRIPS) + " |")
    print("|---" * (1 + 2 * len(STRIPS)) + "|")
    for rows in ROWS:
        program = traced(rows)
        jobs = [lowered(program, strips) for strips in STRIPS]
        cells = [f"{period(job, on):.1f} ms" for job in jobs for on in (H100, DIRECT)]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
