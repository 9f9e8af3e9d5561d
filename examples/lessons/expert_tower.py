"""A tower whose blocks have experts: each row goes through the two that a router chooses for it."""

import torch
import tower
from torch import nn

import piper

WIDTH, BLOCKS, EXPERTS, CHOSEN = 32, 8, 16, 2


class Experts(nn.Module):
    """All experts of a block. Rows are sorted by expert, and `counts` says how many each one gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.05 * torch.randn(EXPERTS, width, 4 * width))
        self.down = nn.Parameter(0.05 * torch.randn(EXPERTS, 4 * width, width))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(piper.grouped_mm(rows, self.up, counts))
        return piper.grouped_mm(hidden, self.down, counts)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, EXPERTS, bias=False)
        self.dense = tower.Block(width)  # each row goes through it, as through a layer's attention
        self.experts = Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        normed = self.norm(x)
        weights, chosen = self.router(normed).softmax(-1).topk(CHOSEN, dim=-1)
        return x + piper.mixture(self.experts, normed, chosen, weights, num_experts=EXPERTS)


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with piper.annotate("PP"):
                x = block(x)
        return x


def model(width: int = WIDTH) -> nn.Module:
    return Tower(width)
