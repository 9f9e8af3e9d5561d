"""How long, and in how much memory, a 70-billion-parameter model traces and lowers.

Run: python benchmarks/trace_70b.py
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.strategies import parallel

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY, LENGTH = 80, 8192, 28672, 64, 8, 128256, 4096


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm1 = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(y).view(batch, length, 2 * KV_HEADS, -1).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * cos + half * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        size = WIDTH // HEADS
        rates = 500000.0 ** (-torch.arange(0, size, 2, device=tokens.device) / size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates).repeat(
            1, 2
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x, cos, sin)
        return self.head(self.norm(x))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    tokens = torch.zeros(256, LENGTH, dtype=torch.int64)
    start = time.perf_counter()
    program = piper.trace(Model, {"tokens": tokens, "labels": tokens}, step)
    traced = time.perf_counter() - start
    count = sum(v.nbytes // 4 for v in program.graph.values.values() if v.role == "param")
    print(f"{count / 1e9:.1f} billion parameters, {len(program.graph.nodes)} nodes")
    print(f"trace {traced:.1f} s, peak {peak():.2f} GiB")
    pipeline: dict[str, Any] = {"pp": 8, "schedule": "interleaved_1f1b", "microbatches": 8}
    for degrees in (
        {"dp": 32},
        {"dp": 32, "zero": 1, "tp": 8},
        {"dp": 32, "zero": 1, "tp": 8, "sp": True},
    ):
        start = time.perf_counter()
        job = program.apply(parallel(**pipeline, **degrees)).lower()
        words = " ".join(f"{name}={degree}" for name, degree in degrees.items())
        print(f"pp=8 {words}: lower {time.perf_counter() - start:.1f} s, peak {peak():.2f} GiB")
        plan = job.plan
        tasks, classes = sum(len(part.tasks) for part in plan.classes), len(plan.classes)
        print(
            f"  {plan.mesh.size} ranks, {tasks} tasks in {classes} classes, {len(plan.bodies)} bodies"
        )


if __name__ == "__main__":
    main()
