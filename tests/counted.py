"""A program whose parameters count on how many samples of each number it was trained, and data for it
in every form that training can go on in; worker processes import the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import piper
from piper.strategies import parallel

NUM = 40
Batch = dict[str, torch.Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(NUM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.counts[ids]


def step(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample takes 1 / rows from its count, by SGD with a learning rate of 1."""
    found = model(batch["ids"])
    return found.sum(), torch.tensor(float(len(found)))


@cache
def job(dp: int, size: int) -> piper.Job:
    program = piper.trace(Model, {"ids": torch.zeros(size, dtype=torch.int64)}, step)
    return program.apply(parallel(dp=dp)).lower(optimizer=piper.sgd(lr=1.0), seed=3)


def counts(run: piper.Run, size: int) -> torch.Tensor:
    return -size * run.parameters()["counts"]


class Numbers(Dataset):
    read: ClassVar[list[int]] = []  # in this process, since a test cleared it

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Batch:
        self.read.append(index)
        return {"ids": torch.tensor(index)}


class InOrder(IterableDataset):
    def __iter__(self) -> Iterator[Batch]:
        for index in range(NUM):
            yield {"ids": torch.tensor(index)}


def loader(size: int, **options: Any) -> DataLoader:
    return DataLoader(Numbers(), batch_size=size, **{"shuffle": True, **options})


def of_8(share: piper.Share) -> Iterator[Batch]:
    while True:
        yield from share.of(loader(8))


def of_4(share: piper.Share) -> Iterator[Batch]:
    while True:
        yield from share.of(loader(4))


def kept_8(share: piper.Share) -> Iterator[Batch]:
    """One loader for all epochs, in order."""
    mine = share.of(loader(8, shuffle=False))
    while True:
        yield from mine


def begun_8(share: piper.Share) -> Iterator[Batch]:
    """A function that begins at share.start by itself."""
    return _numbered(share, share.start, 8)


def begun_4(share: piper.Share) -> Iterator[Batch]:
    return _numbered(share, share.start, 4)


def plain_8(share: piper.Share) -> Iterator[Batch]:
    """A function that always begins anew."""
    return _numbered(share, 0, 8)


def plain_4(share: piper.Share) -> Iterator[Batch]:
    return _numbered(share, 0, 4)


def _numbered(share: piper.Share, first: int, size: int) -> Iterator[Batch]:
    while True:
        ids = torch.arange(first, first + size) % NUM
        yield {"ids": ids[share.rows(size)]}
        first += size


class Stateful:
    """A loader with torchdata's protocol. Another process cannot guess where it begins."""

    made = 0  # batches, in this process

    def __init__(self, share: piper.Share, size: int = 8) -> None:
        self.share, self.size = share, size
        self.first = torch.tensor(0)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            Stateful.made += 1
            ids = torch.arange(int(self.first), int(self.first) + self.size) % NUM
            self.first = self.first + self.size
            yield {"ids": ids[self.share.rows(self.size)]}

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first}  # a tensor, which JSON has no word for

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]


def stateful_8(share: piper.Share) -> Stateful:
    return Stateful(share)


DAMAGED = 13


class Damaged(Numbers):
    """One sample cannot be read, or not the first times that a process tries."""

    tries = 0

    def __init__(self, times: int) -> None:
        self.times = times

    def __getitem__(self, index: int) -> Batch:
        if index == DAMAGED:
            Damaged.tries += 1
            if Damaged.tries <= self.times:
                raise OSError("block 7 is damaged")
        return super().__getitem__(index)


def damaged_loader(times: int, **options: Any) -> DataLoader:
    return DataLoader(Damaged(times), batch_size=8, shuffle=True, **options)


def twice_damaged(share: piper.Share) -> Iterator[Batch]:
    while True:
        yield from share.of(damaged_loader(2))


def damaged(share: piper.Share) -> Iterator[Batch]:
    while True:
        yield from share.of(damaged_loader(10**6))


def damaged_begun(share: piper.Share) -> Iterator[Batch]:
    return _damaged(begun_8(share), 10**6)


def damaged_plain(share: piper.Share) -> Iterator[Batch]:
    return _damaged(plain_8(share), 10**6)


def twice_damaged_plain(share: piper.Share) -> Iterator[Batch]:
    return _damaged(plain_8(share), 2)


def twice_damaged_begun(share: piper.Share) -> Iterator[Batch]:
    return _damaged(begun_8(share), 2)


def _damaged(batches: Iterator[Batch], times: int) -> Iterator[Batch]:
    for batch in batches:
        if DAMAGED in batch["ids"]:
            Damaged.tries += 1
            if Damaged.tries <= times:
                raise OSError("block 7 is damaged")
        yield batch


class TwiceDamaged(Stateful):
    """A loader with a state that has moved on when it raises."""

    def __iter__(self) -> Iterator[Batch]:
        return _damaged(super().__iter__(), 2)


GIVEN: dict[str, Callable[[], Any]] = {  # global batches, or a function
    "list": lambda: [{"ids": torch.arange(i, i + 8)} for i in range(0, NUM, 8)],
    "generator": lambda: ({"ids": torch.arange(i, i + 8)} for i in range(0, NUM, 8)),
    "loader": lambda: loader(8),
    "iterable": lambda: DataLoader(InOrder(), batch_size=8),
    "stateful": lambda: Stateful(piper.Share(0, 1)),
    "function": lambda: of_8,
}
