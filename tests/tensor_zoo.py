"""Small transformers whose tensors can be cut over 2 and 4 ranks, with one difficulty each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.training.verify import Trained, train_one_device
from tests.zoo import ADAMW, EXPERTS, MoE

VOCABULARY, WIDTH, LENGTH, BATCH, HEADS = 16, 8, 8, 16, 4
STEPS = 3


class Columns(nn.Module):
    """A matrix [inputs, outputs], as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Key biases have no gradient but noise, so that there are none. `fused` is the sizes of queries,
    keys and values in one matrix; of keys and values there may be fewer heads."""

    def __init__(self, fused: tuple[int, ...], dropout: float, columns: bool) -> None:
        super().__init__()
        self.fused, self.dropout = fused, dropout
        if columns:
            self.qkv: nn.Module = Columns(WIDTH, sum(fused))
        elif fused:
            self.qkv = nn.Linear(WIDTH, sum(fused), bias=len(set(fused)) == 1)
        else:
            self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.fused
        parts = self.qkv(x).split(fused, -1) if fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Mixture(nn.Module):
    """Two of four experts for each row, by a router that learns; gates and values in one matrix, and
    biases. The code inside takes rows apart and puts them together."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(rows[:, :1])
        both = piper.grouped_mm(rows, self.up.transpose(1, 2), counts)
        both = both + piper.grouped_mm(ones, self.up_bias.unsqueeze(1), counts)
        gate, up = both.chunk(2, -1)
        hidden = (F.silu(gate) * up).unflatten(1, (4, -1)).tanh().flatten(1)
        bias = piper.grouped_mm(ones, self.down_bias.unsqueeze(1), counts)
        return piper.grouped_mm(hidden, self.down, counts) + bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        made = piper.mixture(self.experts, rows, chosen, weights, num_experts=EXPERTS)
        return made.view(x.shape)


class Block(nn.Module):
    def __init__(
        self,
        *,
        fused: tuple[int, ...],
        dropout: float,
        experts: bool,
        mixture: bool,
        norm: type[nn.Module],
        columns: bool,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention = Attention(fused, dropout, columns)
        self.gate_up = len(set(fused)) > 1
        if self.gate_up:
            self.both = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        else:
            self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.moe = MoE() if experts else None
        self.mixture = Mixture() if mixture else None

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        if self.moe is not None:
            x = x + self.moe(y, route)
        if self.mixture is not None:
            x = x + self.mixture(y)
        gate, up = self.both(y).chunk(2, -1) if self.gate_up else (self.gate(y), self.up(y))
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(
        self,
        *,
        tied: bool = False,
        fused: tuple[int, ...] = (),
        dropout: float = 0.0,
        experts: bool = False,
        mixture: bool = False,
        norm: type[nn.Module] = nn.LayerNorm,
        columns: bool = False,
        num_stages: int = 2,
    ) -> None:
        super().__init__()
        block = partial(
            Block,
            fused=fused,
            dropout=dropout,
            experts=experts,
            mixture=mixture,
            norm=norm,
            columns=columns,
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_stages))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x, batch["route"])
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    name: str
    make_model: Callable[[], nn.Module]
    mean: bool = True

    def model(self) -> nn.Module:
        return self.make_model().double()

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        ignored = torch.rand(BATCH, LENGTH, generator=generator) < 0.4
        labels = torch.where(ignored, -100, labels)
        labels[:, 0] = tokens[:, 1]  # every microbatch has one at least
        route = torch.randint(4, (BATCH, LENGTH), generator=generator)
        return {"tokens": tokens, "labels": labels, "route": route}

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        logits, labels = model(batch).flatten(0, 1), batch["labels"].flatten()
        if self.mean:
            return F.cross_entropy(logits, labels.clamp(min=0))
        total = F.cross_entropy(logits, labels, reduction="sum")
        return total, (labels != -100).sum()


CASES = {
    case.name: case
    for case in (
        Case("dense", Model),
        Case("tied", lambda: Model(tied=True)),
        Case("fused", lambda: Model(fused=(WIDTH, WIDTH, WIDTH))),
        Case("columns", lambda: Model(fused=(WIDTH, WIDTH, WIDTH), columns=True)),
        Case("grouped", lambda: Model(fused=(WIDTH, WIDTH // 2, WIDTH // 2), dropout=0.1)),
        Case("rms", lambda: Model(norm=nn.RMSNorm)),
        Case("dropout", lambda: Model(dropout=0.3)),
        Case("experts", lambda: Model(experts=True)),
        Case("mixture", lambda: Model(mixture=True)),
        Case("deep_mixture", lambda: Model(mixture=True, num_stages=4)),
        Case("counted", Model, mean=False),
        Case("deep", lambda: Model(tied=True, num_stages=4)),
        Case("deep_dense", lambda: Model(num_stages=4)),
        Case("deep_fused", lambda: Model(fused=(WIDTH, WIDTH, WIDTH), num_stages=4)),
        Case("deep_dropout", lambda: Model(dropout=0.3, num_stages=4)),
        Case("deep_counted", lambda: Model(num_stages=4), mean=False),
    )
}


@cache
def program_of(name: str) -> Program:
    case = CASES[name]
    return piper.trace(case.model, case.batch(0), case.step)


def batches_of(name: str) -> list[Any]:
    return [CASES[name].batch(seed) for seed in range(STEPS)]


@cache
def _reference(name: str, pieces: int, clip: float | None) -> Trained:
    job = (
        program_of(name)
        .apply(lambda s: s.split(piper.where(), "MB", pieces))
        .lower(optimizer=ADAMW, clip=clip)
    )
    return train_one_device(job, batches_of(name))


def reference_of(name: str, job: Job) -> Trained:
    """One device's training; the same for every strategy with the same global microbatches."""
    plan = job.plan
    return _reference(name, plan.num_data_ranks * plan.num_microbatches, plan.clip)
