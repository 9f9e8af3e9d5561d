"""Random small models: a number in, a model with random stages, skips, ties and losses out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.training.verify import Trained, train_one_device

WIDTH, LENGTH, BATCH, VOCABULARY = 4, 3, 24, 7
KINDS = ("linear", "norm", "attention", "moe", "dropout", "branch", "frozen", "plain", "integers")
ADAMW = piper.adamw(lr=1e-2)


def in_groups(params: list[Tensor]) -> torch.optim.Optimizer:
    """Every third parameter has the same arguments."""
    groups = [{"params": params[i::3], "lr": 0.01 * (i + 1)} for i in range(3) if params[i::3]]
    return torch.optim.AdamW([g | {"weight_decay": g["lr"]} for g in groups])


@dataclass(frozen=True)
class Spec:
    """What a random model is made of; stages are numbered from 0."""

    kinds: tuple[str, ...]
    experts: int  # of every stage that has some
    skips: tuple[tuple[int, int], ...]  # the input of one stage is added in a later one
    ties: tuple[tuple[int, int], ...]  # two stages with one weight
    sides: tuple[int, ...]  # stages that read the input of the stage before them
    tied_head: bool
    tagged: bool
    mean: bool
    random_experts: bool = False  # dropout among experts, which may not be sharded
    returns: bool = False  # the head belongs to the first stage
    frozen_embed: bool = False
    normed_experts: bool = False  # a norm's result is read by the gate and again after the experts

    @property
    def num_stages(self) -> int:
        return len(self.kinds)

    @property
    def features(self) -> frozenset[str]:
        found = {*self.kinds, "mean" if self.mean else "counted"}
        for name in ("skips", "ties", "sides", "tied_head", "returns", "frozen_embed"):
            found |= {name} if getattr(self, name) else set()
        if self.random_experts and "moe" in self.kinds:
            found.add("random_experts")
        if self.normed_experts and "moe" in self.kinds:
            found.add("normed_experts")
        return frozenset(found | (set() if self.tagged else {"untagged"}))

    def alike(self) -> list[set[int]]:
        """Sets of stages that share parameters, and so have to be replicated alike."""
        sets = [{stage} for stage in range(self.num_stages)]
        end = 0 if self.returns else self.num_stages - 1  # where the head is
        pairs = [*self.ties, *([(0, end)] if self.tied_head else [])]
        # Integers are looked up in the embedding, one stage later.
        later = [*range(1, self.num_stages), end]
        pairs += [(0, later[i]) for i, kind in enumerate(self.kinds) if kind == "integers"]
        for one, other in pairs:
            joined = [s for s in sets if one in s or other in s]
            sets = [s for s in sets if s not in joined] + [set().union(*joined)]
        return sets


def spec_of(number: int) -> Spec:
    """The random model of a number. The first ones have all kinds of stages between them."""
    rng = random.Random(number)
    kinds = [rng.choice(KINDS) for _ in range(rng.randint(2, 5))]
    kinds[rng.randrange(len(kinds))] = KINDS[number % len(KINDS)]
    if rng.random() < 0.4:
        kinds[rng.randrange(len(kinds))] = "moe"
    stages = range(len(kinds))
    pairs = [(i, j) for i in stages for j in stages if i < j]
    weighted = [i for i in stages if kinds[i] not in ("plain", "moe")]
    ties = [(i, j) for i, j in pairs if i in weighted and j in weighted]
    return Spec(
        kinds=tuple(kinds),
        experts=rng.choice((2, 3, 4, 6)),
        skips=tuple(rng.sample(pairs, min(len(pairs), rng.choice((0, 0, 1, 2))))),
        ties=tuple(rng.sample(ties, min(len(ties), rng.choice((0, 0, 1, 2))))),
        sides=tuple(i for i in stages if i and rng.random() < 0.15),
        tied_head=rng.random() < 0.3,
        tagged=number % 4 != 3,
        mean=rng.random() < 0.6,
        random_experts=number % 16 == 4,
        returns=number % 4 != 3 and rng.random() < 0.15,
        frozen_embed=rng.random() < 0.2,
        normed_experts=rng.random() < 0.5,
    )


class Experts(nn.Module):
    def __init__(self, num: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Parameter(torch.randn(num, WIDTH, 5) * 0.4)
        self.down = nn.Parameter(torch.randn(num, 5, WIDTH) * 0.4)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        hidden = torch.tanh(piper.grouped_mm(rows, self.up, counts))
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return piper.grouped_mm(hidden, self.down, counts)


class Stage(nn.Module):
    """One stage of a kind; all take and give [batch, length, width]."""

    def __init__(self, kind: str, spec: Spec) -> None:
        super().__init__()
        self.kind, self.num_experts = kind, spec.experts
        if kind != "plain":
            self.linear = nn.Linear(WIDTH, WIDTH)
        self.normed = kind == "moe" and spec.normed_experts
        if kind in ("norm", "attention") or self.normed:
            self.norm = nn.LayerNorm(WIDTH)
        if kind in ("attention", "branch"):
            self.more = nn.Linear(WIDTH, 3 * WIDTH)
        if kind == "moe":
            self.experts = Experts(spec.experts, 0.3 if spec.random_experts else 0.0)
            self.gate = nn.Linear(WIDTH, spec.experts)
        if kind == "frozen":
            self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
            self.read = nn.Parameter(torch.randn(WIDTH))  # read, but no gradient comes back
            self.register_buffer("table", torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return getattr(self, f"_{self.kind}")(x, route)

    def _linear(self, x: Tensor, route: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def _norm(self, x: Tensor, route: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))

    def _attention(self, x: Tensor, route: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.more(self.norm(x)).chunk(3, -1))
        return x + self.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))

    def _dropout(self, x: Tensor, route: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(F.dropout(x, 0.2))), 0.3)

    def _branch(self, x: Tensor, route: Tensor) -> Tensor:
        one, two, three = self.more(x).chunk(3, -1)
        return one * torch.sigmoid(two) + self.linear(three.detach() + x)

    def _frozen(self, x: Tensor, route: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.sigmoid(self.read)
        return self.linear(x) * scale * self.fixed + self.table

    def _plain(self, x: Tensor, route: Tensor) -> Tensor:
        return torch.tanh(x) * 1.5

    def _integers(self, x: Tensor, route: Tensor) -> Tensor:
        return self.linear(x)  # the model makes integers and a mask of it

    def _moe(self, x: Tensor, route: Tensor) -> Tensor:
        x = self.norm(x) if self.normed else x
        tokens, expert = x.flatten(0, 1), route.flatten() % self.num_experts
        order = expert.argsort(stable=True)
        weight = self.gate(tokens).softmax(-1).gather(1, expert[:, None])
        counts = torch.zeros(self.num_experts, dtype=torch.int64).scatter_add(
            0, expert, expert * 0 + 1
        )
        rows = tokens.index_select(0, order)
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        back = torch.zeros_like(tokens).index_copy(0, order, rows)
        return self.linear(x) + (back * weight).view(x.shape)


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList(Stage(kind, spec) for kind in spec.kinds)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if spec.tied_head:
            self.head.weight = self.embed.weight
        if spec.frozen_embed:
            self.embed.weight.requires_grad_(False)
        for one, other in spec.ties:
            self.stages[other].linear.weight = self.stages[one].linear.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["tokens"])
        inputs: list[Tensor] = []
        side: tuple[Tensor, Tensor] | None = None  # an integer and a mask for the next stage
        for number, stage in enumerate(self.stages):
            inputs.append(x)
            if self.spec.tagged:
                with piper.annotate("PP"):
                    x, side = self._stage(number, stage, inputs, side, batch["route"])
            else:
                x, side = self._stage(number, stage, inputs, side, batch["route"])
        if self.spec.returns:
            with piper.annotate("PP", 0):
                return self._end(x, side)
        return self._end(x, side)

    def _end(self, x: Tensor, side: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.head(x if side is None else x + self.embed(side[0]))

    def _stage(
        self,
        number: int,
        stage: nn.Module,
        inputs: list[Tensor],
        side: tuple[Tensor, Tensor] | None,
        route: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        x = inputs[number]
        if number in self.spec.sides:
            x = x + 0.5 * inputs[number - 1]
        if side is not None:
            x = x.masked_fill(side[1], 0.1) + self.embed(side[0])
        y = stage(x, route)
        for source, target in self.spec.skips:
            if target == number:
                y = y + 0.3 * inputs[source]
        if self.spec.kinds[number] == "integers":
            side = (y.detach().argmax(-1), y.detach() > 0)
        else:
            side = None
        return y, side


def make(spec: Spec) -> nn.Module:
    return Model(spec).double()


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[:4] = torch.where(torch.rand(4, LENGTH, generator=generator) < 0.7, -100, labels[:4])
    labels[0, 0] = 1
    route = torch.randint(6, shape, generator=generator)
    route[::3] = 1  # some experts have most rows, others none
    return {"tokens": tokens, "labels": labels, "route": route}


def step_of(spec: Spec) -> Any:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits, labels = model(batch).flatten(0, 1), batch["labels"].flatten()
        if spec.mean:
            return F.cross_entropy(logits, labels.clamp(min=0))
        total = F.cross_entropy(logits, labels, reduction="sum")
        return total, (labels != -100).sum()

    return step


@cache
def program_of(spec: Spec) -> Program:
    return piper.trace(lambda: make(spec), batch_of(0), step_of(spec))


def batches() -> list[dict[str, Tensor]]:
    return [batch_of(seed) for seed in range(2)]


_references: dict[tuple[Spec, int, float | None, int], Trained] = {}


def reference_of(spec: Spec, job: Job) -> Trained:
    """One device's training on the job's global microbatches; made once for all that agree on them."""
    plan = job.plan
    pieces = plan.num_data_ranks * plan.num_microbatches
    key = (spec, pieces, plan.clip, len(plan.param_groups))
    if key not in _references:
        _references[key] = train_one_device(job, batches())
    return _references[key]
