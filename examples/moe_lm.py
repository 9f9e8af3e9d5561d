"""A byte-level mixture-of-experts language model that learns Paradise Lost.

    piper train examples/moe_lm.py --steps 60                                # one device
    piper train examples/moe_lm.py --steps 60 --pp 2 --dp 2 --ep 2 --zero 2 \\
        --schedule dualpipev --microbatches 4 --evaluate-every 30            # `make demo`
"""

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import piper

TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"
WIDTH, HEADS, LENGTH, BATCH = 64, 4, 64, 32
LAYERS, EXPERTS, TOP_K, HELD_OUT = 4, 4, 2, 40_000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    """All experts of a layer: rows sorted by expert in, rows in the same order out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(piper.grouped_mm(rows, self.up, counts))
        return piper.grouped_mm(hidden, self.down, counts)


class MoE(nn.Module):
    """Each token goes to its two best experts, however many choose the same one: none is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K, dim=-1)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))
        rows = tokens.index_select(0, order // TOP_K)
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        rows = rows * weights.flatten().index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, rows).view(x.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.moe = Attention(), MoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return LanguageModel()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)


def lr_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Up within 5 steps, then down slowly."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 1 / math.sqrt(max(1, step / 20)))
    )


@functools.cache
def text() -> torch.Tensor:
    return torch.tensor(list(TEXT.read_bytes()))


def windows(starts: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is written from each place on, and what follows each byte of it."""
    found = text()[starts[:, None] + torch.arange(LENGTH + 1)]
    return {"tokens": found[:, :-1].contiguous(), "labels": found[:, 1:].contiguous()}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """A global batch: windows at random places of the poem, but not in its last lines."""
    generator = torch.Generator().manual_seed(seed)
    last = len(text()) - HELD_OUT - LENGTH - 1
    return windows(torch.randint(last, (BATCH,), generator=generator))


def data(share: piper.Share) -> Iterator[dict[str, torch.Tensor]]:
    """The rows of one data rank, without end."""
    number = share.seed
    while True:
        rows = share.rows(BATCH)
        yield {name: leaf[rows].clone() for name, leaf in batch(number).items()}
        number += 1


def validation(share: piper.Share) -> Iterator[dict[str, torch.Tensor]]:
    """Lines from the end of the poem that training never sees."""
    starts = torch.linspace(len(text()) - HELD_OUT, len(text()) - LENGTH - 1, 4 * BATCH).long()
    for part in starts.chunk(4):
        yield windows(part[share.rows(BATCH)])
