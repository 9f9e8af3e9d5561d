"""Data functions that worker processes import."""

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

import piper
from tests.zoo import BATCH, CASES

NAME, NUM = "deep_moe", 6


def rows(share: piper.Share) -> Iterator[Any]:
    """This share of what the driver would read."""
    for seed in range(NUM):
        batch = CASES[NAME].batch(seed)
        yield {name: leaf[share.rows(BATCH)] for name, leaf in batch.items()}


class Samples(Dataset):
    """The samples of some batches, one by one; notes which were read."""

    def __init__(self) -> None:
        self.batches = [CASES[NAME].batch(seed) for seed in range(NUM)]
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        batch = self.batches[index // BATCH]
        return {name: leaf[index % BATCH] for name, leaf in batch.items()}


def loader() -> DataLoader:
    return DataLoader(Samples(), batch_size=BATCH, shuffle=True)


def loaded(share: piper.Share) -> Any:
    return share.of(loader())


def uneven(share: piper.Share) -> Iterator[Any]:
    """One data rank has fewer batches than the others."""
    for number, batch in enumerate(rows(share)):
        if share.rank == 1 and number == 2:
            return
        yield batch


def misshapen(share: piper.Share) -> Iterator[Any]:
    """The second batch of one data rank has a row too few."""
    for number, batch in enumerate(rows(share)):
        short = share.rank == 1 and number == 1
        yield {name: leaf[1:] for name, leaf in batch.items()} if short else batch


def broken(share: piper.Share) -> Iterator[Any]:
    """One data rank's file is damaged."""
    for number, batch in enumerate(rows(share)):
        if share.rank == 1 and number == 1:
            raise OSError("block 7 is damaged")
        yield batch


def blocked(share: piper.Share) -> Iterator[Any]:
    """The second batch of one data rank never comes."""
    for number, batch in enumerate(rows(share)):
        if share.rank == 1 and number == 1:
            time.sleep(1000)
        yield batch
