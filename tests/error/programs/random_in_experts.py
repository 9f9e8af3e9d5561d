"""Dropout inside of experts that are sharded: which row gets which number depends on where it goes."""

import torch
import torch.nn.functional as F
from _model import Experts, Model, batch, step  # noqa: F401
from torch import nn

from piper import Schedule, where


class Dropping(Experts):
    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(rows, counts), 0.1)


def model() -> nn.Module:
    made = Model()
    made.experts = Dropping()
    return made


def strategy(s: Schedule) -> None:
    s.mesh(ep=2)
    s.replicate(where(EP=None), over="ep")
    s.shard(where(EP="*"), over="ep")
