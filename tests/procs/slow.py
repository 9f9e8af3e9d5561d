"""Data that gives one batch and no second one; imported by worker processes."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import piper


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 16:
            time.sleep(600)
        return torch.ones(4)


def batches() -> Iterator[torch.Tensor]:
    yield torch.ones(8, 4)
    time.sleep(600)


def data(share: piper.Share) -> Iterator[torch.Tensor]:
    yield torch.ones(8 // share.num_ranks, 4)
    time.sleep(600)


def loader(num_workers: int) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=8, num_workers=num_workers)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def job() -> piper.Job:
    program = piper.trace(lambda: nn.Linear(4, 2), torch.ones(8, 4), step)
    return program.apply(piper.strategies.parallel(dp=2)).lower()
