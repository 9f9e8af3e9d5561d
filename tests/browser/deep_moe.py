"""A mixture of experts in sixteen stages, for the plan of 64 ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import piper

WIDTH, EXPERTS, VOCABULARY, LENGTH, STAGES, ROWS = 64, 8, 256, 32, 16, 256


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
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x)
        return self.head(x)


def model() -> nn.Module:
    return Model()


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    return {"x": tokens, "y": tokens.roll(-1, 1)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
