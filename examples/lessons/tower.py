"""The model of most lessons: a tower of eight equal blocks, each tagged as a region, and its data."""

import torch
import torch.nn.functional as F
from torch import nn

import piper

WIDTH, BLOCKS, BATCH = 32, 8, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with piper.annotate("PP"):  # regions PP=0, 1, ..., 7
                x = block(x)
        return x


def model(width: int = WIDTH) -> nn.Module:
    return Tower(width)


def batch(seed: int = 0, *, rows: int = BATCH, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """A global batch: vectors, and the same vectors turned by one place, which is to be learned."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.roll(1, dims=1)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])
