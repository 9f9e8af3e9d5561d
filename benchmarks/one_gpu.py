"""One rank on one GPU: a step under Piper beside the plain eager loop, and how far apart they are.

Run on a machine with CUDA: python benchmarks/one_gpu.py
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.job import Job
from piper.runtime.worker.weights import initial_value
from piper.training.verify import compare, train_one_device

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH, BATCH, MICROBATCHES = 1024, 8, 16, 32000, 1024, 8, 2


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return self.head(x)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(
        logits.float() if logits.dtype == torch.bfloat16 else logits, batch["labels"].flatten()
    )


def make_batch(size: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    text = torch.randint(vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def lower(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], **options: object) -> Job:
    program = piper.trace(make, batch, step)
    program = program.apply(lambda s: s.split(piper.where(), "MB", MICROBATCHES))
    return program.lower(optimizer=piper.adamw(lr=1e-4, **options), device="cuda")


def parity() -> None:
    """Float64, small: losses, gradients and parameters against the eager module on the CPU."""
    batch = make_batch(4, 16, 97)
    job = lower(lambda: Model(32, 2, 4, 97).double(), batch)
    reference = train_one_device(job, [batch] * 3)
    with job.launch("single") as run:
        errors = compare(run, [batch] * 3, reference)
    print(
        f"float64 parity: loss {errors.loss:.1e}, gradient {errors.gradient:.1e}, "
        f"parameter {errors.parameter:.1e}: {'exact' if errors.exact else 'NOT EXACT'}"
    )
    if not errors.exact:
        raise SystemExit(f"{errors}")


def eager(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = BATCH // MICROBATCHES

    def one() -> float:
        total = 0.0
        for m in range(MICROBATCHES):
            part = {k: v[m * rows : (m + 1) * rows].cuda() for k, v in batch.items()}
            loss = step(model, part) / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return one


def timed(one: Callable[[], float], steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        one()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def speed(dtype: torch.dtype) -> None:
    batch = make_batch(BATCH, LENGTH, VOCABULARY)
    job = lower(lambda: Model(WIDTH, LAYERS, HEADS, VOCABULARY).to(dtype), batch, fused=True)
    model = Model(WIDTH, LAYERS, HEADS, VOCABULARY).to(dtype)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, spec in job.plan.tensors.items():
            named[name].copy_(initial_value(spec, job.bodies, seed=0))
    plain = eager(copy.deepcopy(model).cuda(), batch)
    with job.launch("single") as run:
        first = (run.step(batch).loss, plain())
        for _ in range(3):
            run.step(batch), plain()
        # Rounds in turn, so that both meet the same machine.
        times = [(timed(lambda: run.step(batch).loss, 5), timed(plain, 5)) for _ in range(4)]
    mine, other = (sorted(column)[len(column) // 2] for column in zip(*times, strict=True))
    print(
        f"{str(dtype).removeprefix('torch.')}: first losses {first[0]:.6f} and {first[1]:.6f}; "
        f"Piper {mine:.1f} ms, eager {other:.1f} ms a step, ratio {mine / other:.3f}"
    )
    if abs(first[0] - first[1]) > 1e-2 * abs(first[1]):
        raise SystemExit("the losses differ")


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    parity()
    for dtype in (torch.float32, torch.bfloat16):
        speed(dtype)


if __name__ == "__main__":
    main()
