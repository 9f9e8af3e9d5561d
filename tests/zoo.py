"""Small models with one difficulty each, in two stages or (`deep`) four; most have experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.training.verify import Trained, train_one_device

VOCABULARY, WIDTH, LENGTH, BATCH, EXPERTS = 11, 8, 4, 16, 4
STEPS = 3
PIECES = 8  # global microbatches of nearly every case, so that they share one reference


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) * 0.3)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(piper.grouped_mm(rows, self.up, counts))
        return piper.grouped_mm(hidden, self.down, counts)


class MoE(nn.Module):
    """Rows go where the batch says, so that a test decides how uneven the load is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        tokens, expert = x.flatten(0, 1), route.flatten()
        order = expert.argsort(stable=True)
        weight = self.gate(tokens).softmax(-1).gather(1, expert[:, None])
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add(
            0, expert, expert * 0 + 1
        )
        rows = tokens.index_select(0, order)
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        back = torch.zeros_like(tokens).index_copy(0, order, rows)
        return (back * weight).view(x.shape)


class Stage(nn.Module):
    def __init__(self, experts: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.moe = MoE() if experts else None
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout
        ).squeeze(1)
        x = x + F.dropout(attended, dropout)
        if self.moe is not None:
            x = x + self.moe(x, route)
        return x + F.dropout(torch.tanh(self.mlp(x)), dropout)


class Plain(nn.Module):
    """`experts`: with MoE layers. `tied`: head and embedding share their weight."""

    def __init__(
        self,
        *,
        experts: bool = True,
        tied: bool = False,
        num_stages: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList(Stage(experts, dropout) for _ in range(num_stages))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["tokens"])
        for stage in self.stages:
            with piper.annotate("PP"):
                x = stage(x, batch["route"])
        return self.head(x)


class Untagged(Plain):
    """No stages: a strategy that wants some cuts the model itself."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["tokens"])
        for stage in self.stages:
            x = stage(x, batch["route"])
        return self.head(x)


class Skip(Plain):
    """The embedding is read again at the end of the second stage."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with piper.annotate("PP"):
            first = self.embed(batch["tokens"])
            x = self.stages[0](first, batch["route"])
        with piper.annotate("PP"):
            x = self.stages[1](x, batch["route"]) + 0.5 * first
            return self.head(x)


class Branches(Plain):
    """Both stages read the same input; neither reads the other, until the end."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.embed(batch["tokens"])
            left = self.stages[0](x, batch["route"])
        with piper.annotate("PP"):
            right = self.stages[1](x * 0.7, batch["route"])
            return self.head(left * torch.sigmoid(right))


class Integers(Plain):
    """An integer and a mask, made in the first stage, decide what the second one does."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.stages[0](self.embed(batch["tokens"]), batch["route"])
            nearest = x.detach().argmax(-1)
            mask = x.detach() > 0
        with piper.annotate("PP"):
            x = self.stages[1](x.masked_fill(mask, 0.1), batch["route"])
            return self.head(x + self.embed(nearest))


class Skips(Plain):
    """Four stages: the last reads what the first two made, the third what the embedding made."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        route = batch["route"]
        with piper.annotate("PP"):
            first = self.embed(batch["tokens"])
            x = self.stages[0](first, route)
        with piper.annotate("PP"):
            second = self.stages[1](x, route)
        with piper.annotate("PP"):
            x = self.stages[2](second + 0.3 * first, route)
        with piper.annotate("PP"):
            x = self.stages[3](x * torch.sigmoid(second), route) + 0.5 * first
            return self.head(x)


class Forks(Plain):
    """Four stages: the second and the third read the first, neither the other; the last reads all."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        route = batch["route"]
        with piper.annotate("PP"):
            x = self.stages[0](self.embed(batch["tokens"]), route)
        with piper.annotate("PP"):
            left = self.stages[1](x, route)
        with piper.annotate("PP"):
            right = self.stages[2](x * 0.7, route)
        with piper.annotate("PP"):
            x = self.stages[3](left * torch.sigmoid(right), route) + 0.5 * x
            return self.head(x)


class Normed(nn.Module):
    """A stage with a batch norm behind it."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.norm = stage, nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return self.norm(self.stage(x, route).flatten(0, 1)).view(x.shape)


class Statistics(Plain):
    def __init__(self) -> None:
        super().__init__(experts=False)
        self.stages = nn.ModuleList(map(Normed, self.stages))


@dataclass(frozen=True)
class Case:
    """A model with its batches and step."""

    name: str
    make_model: Callable[[], nn.Module]
    experts: bool = True
    mean: bool = True
    num_stages: int = 2

    def model(self) -> nn.Module:
        return self.make_model().double()

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Labels, tokens, and a route on which one expert has most rows and some have none or one."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        route = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        route[::2, 0] = 3  # samples in pairs: one row of eight goes to the last expert
        route[8:] = torch.randint(2, (8, LENGTH), generator=generator)  # none to experts 2 and 3
        labels[:4] = torch.where(torch.rand(4, LENGTH, generator=generator) < 0.7, -100, labels[:4])
        labels[0, 0] = 1
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
        Case("dense", lambda: Plain(experts=False), experts=False),
        Case("moe", Plain),
        Case("tied", lambda: Plain(tied=True)),
        Case("skip", Skip),
        Case("branches", Branches),
        Case("integers", Integers),
        Case("counted", Plain, mean=False),
        Case("dropout", lambda: Plain(dropout=0.3)),
        Case("deep_dense", lambda: Plain(experts=False, num_stages=4), experts=False, num_stages=4),
        Case(
            "deep_dense_dropout",
            lambda: Plain(experts=False, num_stages=4, dropout=0.3),
            experts=False,
            num_stages=4,
        ),
        Case("deep_moe", lambda: Plain(num_stages=4), num_stages=4),
        Case("deep_skips", lambda: Skips(num_stages=4), num_stages=4),
        Case("deep_branches", lambda: Forks(num_stages=4), num_stages=4),
        Case("deep_dropout", lambda: Plain(num_stages=4, dropout=0.3), num_stages=4),
        Case("deep", lambda: Plain(tied=True, num_stages=4), num_stages=4),
        Case("statistics", Statistics, experts=False),
        Case("untagged", lambda: Untagged(tied=True, num_stages=4), num_stages=4),
    )
}


@cache
def program_of(name: str) -> Program:
    case = CASES[name]
    return piper.trace(case.model, case.batch(0), case.step)


def batches_of(name: str) -> list[Any]:
    return [CASES[name].batch(seed) for seed in range(STEPS)]


@cache
def _reference(name: str, pieces: int) -> Trained:
    job = (
        program_of(name)
        .apply(lambda s: s.split(piper.where(), "MB", pieces))
        .lower(optimizer=ADAMW)
    )
    return train_one_device(job, batches_of(name))


def reference_of(name: str, job: Job) -> Trained:
    """One device's training; the same for every strategy with the same global microbatches."""
    return _reference(name, job.plan.num_data_ranks * job.plan.num_microbatches)


ADAMW = piper.adamw(lr=1e-2)
