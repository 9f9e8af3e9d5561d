"""A script that launches ranks at its top level, and so in each of them again if nothing stopped it."""

from collections.abc import Iterator

import torch
from torch import nn

import piper


def model() -> nn.Module:
    return nn.Linear(6, 3)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(8 // share.num_ranks, 6)


job = piper.trace(model, torch.ones(8, 6), step).apply(piper.strategies.parallel(dp=2)).lower()
piper.train(job, data, steps=2, launch="local")
