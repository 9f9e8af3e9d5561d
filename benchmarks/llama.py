"""A language model of the shape of Llama 3 8B in plain PyTorch, without tags: Piper cuts the stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 14336, 128256
HEADS, KV_HEADS, HEAD = 32, 8, 128
THETA, EPSILON = 500_000.0, 1e-5


def rotary(length: int) -> tuple[Tensor, Tensor]:
    inverse = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        cos, sin = rotary(length)
        q = self.q(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        k = self.k(x).view(batch, length, KV_HEADS, HEAD).transpose(1, 2)
        v = self.v(x).view(batch, length, KV_HEADS, HEAD).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, HEADS * HEAD))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.attention = Attention()
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def batch(rows: int, length: int = 128) -> dict[str, Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens}
