"""A FILE for `piper train` whose steps take a while, and go on changing the model."""

import time
from collections.abc import Iterator

import torch

import piper
from tests.procs import tiny
from tests.procs.tiny import batch, model, step

__all__ = ["batch", "data", "model", "optimizer", "step"]


def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    for rows in tiny.data(share):
        time.sleep(0.02)
        yield rows
