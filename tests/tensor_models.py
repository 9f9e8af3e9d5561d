"""Small language models, whole and in parts that tensor parallelism splits; and their chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.compiler.source import Source
from piper.frontend.traced import TracedChunk

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 32, 16, 4, 8, 2


class Attention(nn.Module):
    """Separate projections, or one; with fewer heads of keys than of queries if they are separate."""

    def __init__(self, fused: bool, bias: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.fused, self.head = fused, WIDTH // HEADS
        sizes = [3 * WIDTH] if fused else [2 * WIDTH, WIDTH, WIDTH]  # two queries for each key
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, size, bias=bias) for size in sizes)
        self.out = nn.Linear(sizes[0] if not fused else WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made = [project(x) for project in self.inputs]
        parts = made[0].chunk(3, dim=-1) if self.fused else made
        q, k, v = (t.view(*x.shape[:2], -1, self.head).transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=not self.fused, dropout_p=self.dropout
        )
        return self.out(attended.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    def __init__(self, *, fused: bool = False, bias: bool = False, dropout: float = 0.0) -> None:
        """With dropout in attention, too, unless it is fused."""
        super().__init__()
        norm = nn.LayerNorm if fused else nn.RMSNorm
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.attention = Attention(fused, bias, 0.0 if fused else dropout)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x)), self.dropout, self.dropout > 0)
        y = self.norms[1](x)
        return x + F.dropout(
            self.down(F.silu(self.gate(y)) * self.up(y)), self.dropout, self.dropout > 0
        )


class LanguageModel(nn.Module):
    def __init__(self, layers: int, *, tied: bool = False, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(**block) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Blocks(nn.Module):
    """Layers alone, between stages of other code."""

    def __init__(self, layers: int, **block: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(**block) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            for layer in self.layers:
                x = layer(x)
        with piper.annotate("PP"):
            return x.square().mean()


def token_batch(rows: int = BATCH) -> dict[str, Tensor]:
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH) * 7 % VOCABULARY
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def chunks_of(
    make_model: Callable[[], nn.Module],
    batch: dict[str, Tensor],
    step: Callable[[Any, Any], Tensor],
) -> tuple[TracedChunk, ...]:
    rows = next(iter(batch.values())).shape[0]
    source = Source(make_model, batch, step, stages="PP")
    return source.at(rows)[1].chunks


@cache
def language_model_chunk(rows: int = BATCH, layers: int = 2, **sizes: Any) -> TracedChunk:
    """A whole model and its loss in float64, as one chunk."""
    [chunk] = chunks_of(lambda: LanguageModel(layers, **sizes).double(), token_batch(rows), loss_of)
    return chunk


@cache
def blocks_chunk(layers: int, **block: Any) -> TracedChunk:
    """The layers of a model in float64, without what is before and behind."""
    batch = {"x": torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    chunks = chunks_of(lambda: Blocks(layers, **block).double(), batch, lambda m, b: m(b["x"]))
    return next(chunk for chunk in chunks if dict(chunk.tags)["PP"] == 1)


@cache
def llama_chunk() -> TracedChunk:
    """Hugging Face's Llama, tiny, and its cross entropy."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=2 * LENGTH,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    [chunk] = chunks_of(
        lambda: transformers.LlamaForCausalLM(config).double(), token_batch(), loss_of
    )
    return chunk


def random_inputs(chunk: TracedChunk) -> dict[str, Tensor]:
    """Tensors for a chunk's inputs by name: tokens, keys or normal numbers."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, given in zip(chunk.inputs, chunk.code.inputs, strict=True):
        shape, dtype = given.spec.shape, getattr(torch, given.spec.dtype)
        if dtype.is_floating_point:
            made[name] = torch.randn(shape, dtype=dtype, generator=generator) * 0.3
        else:
            high = {"$key": 2**62, "$pla": 2}.get(name[:4], VOCABULARY)
            made[name] = torch.randint(0, high, shape, dtype=dtype, generator=generator)
    return made
