"""Compile speed: DualPipeV with experts, data parallelism and ZeRO, from hundreds to 200,000 nodes, and
a model of the shape of Llama 3 8B under 1F1B.

Times are those of directives, passes and proofs, after tracing and the making of bodies. Prints a
table; with `--write` also into docs/compile_speed.md.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from pathlib import Path
from typing import Any

import llama
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.plan.types import bind
from piper.strategies import parallel

WIDTH, EXPERTS, VOCABULARY, LENGTH = 8, 4, 16, 2
RANKS = 64  # how many task lists are made for single ranks
DOCS = Path(__file__).parents[1] / "docs" / "compile_speed.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, expert = self.gate(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, expert, expert * 0 + 1)
        rows = tokens.index_select(0, order)
        with piper.annotate("EP"):
            rows = piper.grouped_mm(rows, self.up, counts)
        back = torch.zeros_like(tokens).index_copy(0, order, rows)
        return x + self.out((back * weight[:, None]).view(x.shape))


class Model(nn.Module):
    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_stages))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x)
        return self.head(x)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def llama_traced(pp: int, dp: int, microbatches: int) -> Program:
    return piper.trace(llama.Llama, llama.batch(dp * microbatches), llama.step)


def compile_llama(program: Program, *, pp: int, dp: int, microbatches: int, zero: int) -> Job:
    strategy = parallel(
        pp=pp, dp=dp, zero=zero, schedule="1f1b", microbatches=microbatches,
        reduce_every=most_often(zero),
    )  # fmt: skip
    return program.apply(strategy).lower()


def most_often(zero: int) -> int | None:
    """As many reductions as there can be: the largest plans."""
    return 1 if zero > 1 else None


def traced(pp: int, dp: int, microbatches: int) -> Program:
    tokens = torch.zeros(dp * microbatches, LENGTH, dtype=torch.int64)
    return piper.trace(lambda: Model(2 * pp), {"x": tokens, "y": tokens}, step)


def compile_once(program: Program, *, pp: int, dp: int, microbatches: int, zero: int) -> Job:
    strategy = parallel(
        pp=pp, dp=dp, ep=2, zero=zero, schedule="dualpipev", microbatches=microbatches,
        reduce_every=most_often(zero),
    )  # fmt: skip
    return program.apply(strategy).lower()


MODELS = {"experts": (traced, compile_once), "Llama 3 8B": (llama_traced, compile_llama)}


def measure(pp: int, dp: int, microbatches: int, zero: int, model: str) -> dict[str, Any]:
    trace, compile_again = MODELS[model]
    program = trace(pp, dp, microbatches)
    compile_again(program, pp=pp, dp=dp, microbatches=microbatches, zero=zero)  # makes the bodies
    gc.collect()
    start = time.process_time()
    job = compile_again(program, pp=pp, dp=dp, microbatches=microbatches, zero=zero)
    lowered = time.process_time()
    data = job.plan.to_json()
    written = time.process_time()
    chosen = random.Random(0).sample(range(job.plan.mesh.size), min(RANKS, job.plan.mesh.size))
    tasks = sum(len(bind(job.plan, rank).tasks) for rank in chosen)
    bound = time.process_time()
    assert tasks > 0
    return {
        "model": model,
        "ranks": job.plan.mesh.size,
        "microbatches": microbatches,
        "nodes": len(job.graph.nodes),
        "compile": lowered - start,
        "write": written - lowered,
        "bind": bound - written,
        "mib": len(data) / 2**20,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def row(case: dict[str, Any]) -> str:
    micro = case["compile"] / case["nodes"] * 1e6
    return (
        f"| {case['model']} | {case['ranks']:,.0f} | {case['microbatches']:,.0f} "
        f"| {case['nodes']:,.0f} | {case['compile']:.2f} s | {micro:.0f} µs | {case['write']:.2f} s "
        f"| {case['bind']:.3f} s | {case['mib']:.1f} MiB | {case['peak']:,.0f} MiB |"
    )


HEAD = (
    "| model | ranks | microbatches | nodes | compile | per node | write the plan "
    f"| task lists of {RANKS} ranks | plan | peak memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only the smaller half")
    parser.add_argument("--write", action="store_true", help="also into docs/compile_speed.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEAD]
    print(HEAD)
    sizes = [(2, 4, 8), (4, 4, 16), (4, 4, 64), (8, 4, 64), (8, 4, 192), (8, 4, 472)]
    scale = [(4, dp, 32) for dp in (4, 32, 256, 4096)]
    cases = [("experts", *size) for size in (*(sizes[:4] if options.quick else sizes), *scale)]
    if not options.quick:
        cases.append(("Llama 3 8B", 8, 8, 64))
    for model, pp, dp, microbatches in cases:
        line = row(measure(pp, dp, microbatches, options.zero, model))
        lines.append(line)
        print(line, flush=True)
    if options.write:
        DOCS.write_text(
            "# Compile speed\n\nDualPipeV with experts over 2 ranks, data parallelism and ZeRO-"
            f"{options.zero}: CPU seconds of directives, passes and proofs\nafter tracing, with torch "
            f"{torch.__version__}. Made by `python benchmarks/compile_speed.py --write`. Rows of 6,738\n"
            "nodes differ in the number of ranks alone. The last row is a model of the shape of Llama\n"
            "3 8B (`benchmarks/llama.py`) under 1F1B on 64 ranks. Peak memory is that of the process\n"
            "so far, torch included.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
