"""A language model with dropout, and batches of it of several lengths and a smaller last one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.program import Program

VOCABULARY, WIDTH, ROWS = 11, 8, 8
SIZES = [(ROWS, 6), (ROWS, 4), (ROWS, 6), (ROWS, 9), (ROWS, 4), (ROWS // 2, 6)]  # rows, length


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            with piper.annotate("PP"):
                mixed = torch.tanh(layer(x)).cumsum(1)  # what a token sees depends on its place
                x = x + self.dropout(norm(mixed.transpose(1, 2)).transpose(1, 2))
        return x @ self.embedding.weight.T


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batch(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(VOCABULARY, (rows, length), generator=generator)
        for name in ("tokens", "labels")
    }


def batches() -> list[dict[str, Tensor]]:
    return [batch(rows, length, seed) for seed, (rows, length) in enumerate(SIZES)]


def data(share: piper.Share) -> Iterator[Any]:
    """This share of all batches."""
    for found in batches():
        yield {name: leaf[share.rows(len(leaf))] for name, leaf in found.items()}


@cache
def program() -> Program:
    return piper.trace(Mixer, batches()[0], step)
