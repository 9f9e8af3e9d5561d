"""A small dropless mixture-of-experts language model: two tagged stages, experts tagged inside."""

import torch
import torch.nn.functional as F
from torch import nn

import piper

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 16
EXPERTS, TOP_K = 4, 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    """All experts of a layer: rows sorted by expert in, rows in the same order out."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(piper.grouped_mm(rows, self.up, counts))
        return piper.grouped_mm(hidden, self.down, counts)


class MoE(nn.Module):
    """Each token goes to its top-k experts, however many choose the same one: none is dropped."""

    def __init__(self, num_experts: int, top_k: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))
        rows = tokens.index_select(0, order // self.top_k)
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        rows = rows * weights.flatten().index_select(0, order).unsqueeze(-1)
        mixed = torch.zeros_like(tokens).index_add(0, order // self.top_k, rows)
        return mixed.view(x.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.moe = MoE(EXPERTS, TOP_K, WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoETransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return MoETransformer()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences that count upwards from a random start, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    text = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
