"""A FILE for `piper train` with slow steps that go on changing the model; no batch comes twice."""

import time
from collections.abc import Iterator

import torch

import piper
from tests.procs.tiny import ROWS, model, step

__all__ = ["batch", "data", "model", "optimizer", "step"]


def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(seed))


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    for number in range(100_000):
        time.sleep(0.02)
        yield batch(number)[share.rows(ROWS)]
