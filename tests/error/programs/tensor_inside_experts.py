"""Sharded experts of which only the first matrices are cut: rows would be put together in between."""

import torch
from _model import Model, batch, step  # noqa: F401
from torch import nn

import piper
from piper import Schedule, where


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 6, 12))
        self.down = nn.Parameter(torch.ones(4, 12, 6))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = piper.grouped_mm(rows, self.up, counts).relu()
        return piper.grouped_mm(hidden, self.down, counts)


def model() -> nn.Module:
    made = Model()
    made.experts = Experts()
    return made


def strategy(s: Schedule) -> None:
    mesh = s.mesh(ep=2, tp=2)
    s.place(where(), mesh.at())
    s.replicate(where(EP=None), over="ep")
    s.shard(where(EP="*"), over="ep")
    s.shard_tensor(where(), over="tp", params={"*.up": 2})
