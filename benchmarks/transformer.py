"""The transformer of the benchmarks: one tagged model, or the stage modules of a pipeline; and one with
experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Everything that fixes the work of a step; `microbatches` are the global ones."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    microbatches: int
    rows: int  # samples of a microbatch
    dtype: str = "float32"
    experts: bool = False  # whether layers have them
    modules: bool = (
        False  # whether a layer's halves are modules of their own, as torch's styles need it
    )


class Layer(nn.Module):
    """Causal attention and a gated (SwiGLU) feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attended(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Attention(nn.Module):
    """Of however many heads a rank has: the size of a head is what stays."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ModularLayer(nn.Module):
    """The same layer in modules."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attention, self.feed = Attention(sizes), FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class ExpertLayer(Layer):
    """Each token goes to one of `EXPERTS` feed-forwards."""

    EXPERTS = 8

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        width, hidden, num = sizes.width, sizes.hidden, self.EXPERTS
        del self.gate, self.up, self.down
        self.router = nn.Linear(width, num, bias=False)
        self.up = nn.Parameter(torch.randn(num, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        tokens = self.norm2(x).flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        chosen, weights = expert[:, None], weight[:, None]
        made = piper.mixture(self.fed, tokens, chosen, weights, num_experts=self.EXPERTS)
        return x + made.view(x.shape)

    def fed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows, sorted by expert, after theirs."""
        hidden = F.silu(piper.grouped_mm(rows, self.up, counts))
        return piper.grouped_mm(hidden, self.down, counts)


def layer_of(sizes: Sizes) -> type[nn.Module]:
    if sizes.modules:
        return ModularLayer
    return ExpertLayer if sizes.experts else Layer


class Transformer(nn.Module):
    """Tagged in `num_stages` equal parts, or not at all if there are 0; its parameters have the same
    names for any number."""

    def __init__(self, sizes: Sizes, num_stages: int) -> None:
        super().__init__()
        self.num_stages = num_stages
        layer = layer_of(sizes)
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.Sequential(*(layer(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.to(getattr(torch, sizes.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not self.num_stages:
            return self.head(self.norm(self.layers(self.embed(x))))
        size = len(self.layers) // self.num_stages
        for stage in range(self.num_stages):
            with piper.annotate("PP"):
                if stage == 0:
                    x = self.embed(x)
                for layer in self.layers[stage * size : (stage + 1) * size]:
                    x = layer(x)
                if stage == self.num_stages - 1:
                    x = self.head(self.norm(x))
        return x


class Stage(nn.Module):
    """One stage of it, from the same layers under the same names."""

    def __init__(
        self, sizes: Sizes, stage: int, num_stages: int, layer: type[nn.Module] | None = None
    ) -> None:
        super().__init__()
        layer = layer or layer_of(sizes)
        first, last = stage == 0, stage == num_stages - 1
        size = sizes.layers // num_stages
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width) if first else None
        numbers = range(stage * size, (stage + 1) * size)
        self.layers = nn.ModuleDict({str(number): layer(sizes) for number in numbers})
        self.norm = nn.LayerNorm(sizes.width) if last else None
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False) if last else None
        self.to(getattr(torch, sizes.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten())


def step(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model(batch["tokens"]), batch["labels"])


def make_batch(sizes: Sizes, seed: int = 0) -> Batch:
    """A global batch: the same on whichever rank it is made."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.microbatches * sizes.rows, sizes.length + 1)
    text = torch.randint(sizes.vocabulary, shape, generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
