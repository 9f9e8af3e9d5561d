"""Epochs: the loaders of a share, from the sample on where the share begins."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from piper.errors import RunError

_KEPT = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip


class Epochs:
    """How far a share has got in its loaders: `epoch` counts those that were read to their end, one
    after another, `sample` what was read of the present one.

    It begins after `epoch` epochs and `sample` samples. Samples that are more than an epoch has are
    taken from the next.
    """

    def __init__(self, *, seed: int, epoch: int = 0, sample: int = 0) -> None:
        self.used = False
        self.mixed = False  # several at a time, or one that was left before its end
        self.epoch = self.sample = 0
        self._seed = seed
        self._late = epoch + sample > 0
        self._epochs_left, self._samples_left = epoch, sample
        self._reading = self._left_early = False
        self._sizes: deque[int] = deque()  # of batches that were sampled, and maybe not read
        self._passed = 0  # samples of batches that nobody reads, before the next one that is
        self._left_out: list[int] = []  # samples of batches that no share has rows of

    def loader(
        self, loader: DataLoader[Any], rows: Callable[[int], slice | None]
    ) -> DataLoader[Any]:
        """One whose batches have some rows of those of another, which has more of those without any."""
        options = {name: getattr(loader, name) for name in _KEPT}
        sampler = _Rows(self, loader.batch_sampler, rows)
        return _CountedLoader(loader.dataset, epochs=self, batch_sampler=sampler, **options)

    def order(self, batches: Any) -> Iterator[list[int]]:
        """The samples of each batch of the present epoch that is to be read."""
        batches = _seeded(batches, self._seed, self.epoch)
        self._sizes.clear()
        self.sample = self._passed = 0
        if self._epochs_left:
            self._epochs_left -= 1
            _exhaust(batches)
            return
        left, self._samples_left = self._samples_left, 0
        if left and type(batches) is BatchSampler:
            num = _length(batches)
            if num is not None and left >= num:
                self._samples_left = left - num
                _exhaust(batches)
                return
            order = islice(batches.sampler, left, None)
            batches = BatchSampler(order, batches.batch_size, batches.drop_last)
            self.sample, left = left, 0
        for indexes in batches:
            found = list(indexes)
            if left:
                left -= len(found)
                self.sample += len(found)
                if left < 0:
                    raise RunError(
                        f"training went on to sample {self.sample + left} of the epoch, which lies "
                        f"inside of a batch of the DataLoader's batch_sampler",
                        legal="the batch_sampler that was trained with, or DataLoader(batch_size=...)",
                    )
                continue
            self._sizes.append(len(found) + self._passed)
            self._passed = 0
            yield found
        self._samples_left = left

    def leave_out(self) -> None:
        """Nobody reads the batch that was sampled last."""
        self._passed += self._sizes.pop()
        self._left_out.append(self._passed)

    def take_left_out(self) -> list[int]:
        """The samples of batches that were left out since this was asked last."""
        found, self._left_out = self._left_out, []
        return found

    def behind_next(self) -> tuple[int, int] | None:
        """The epoch, and its sample after the batch that is read next, if that was sampled."""
        return (self.epoch, self.sample + self._sizes[0]) if self._sizes else None

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one epoch, counted when they are read: samplers are ahead of that."""
        if self._reading and self._late:
            raise RunError(
                "training cannot go on inside of several loaders that are read at a time",
                legal="share.of(loader) of one loader after another, or a data function that begins "
                "at share.start",
            )
        self.mixed |= self._reading or self._left_early
        self._reading = self._left_early = True
        try:
            for batch in batches:
                if self._sizes:
                    self.sample += self._sizes.popleft()
                yield batch
            self._left_early = False
            self.epoch, self.sample = self.epoch + 1, 0
        finally:
            self._reading = False


class _Rows:
    """A sampler of batches: of each batch of another one, some rows."""

    def __init__(self, epochs: Epochs, batches: Any, rows: Callable[[int], slice | None]) -> None:
        self.epochs, self.batches, self.rows = epochs, batches, rows

    def __iter__(self) -> Iterator[list[int]]:
        for indexes in self.epochs.order(self.batches):
            rows = self.rows(len(indexes))
            if rows is None:
                self.epochs.leave_out()
            else:
                yield indexes[rows]

    def __len__(self) -> int:
        return len(self.batches)


class _CountedLoader(DataLoader[Any]):
    def __init__(self, dataset: Any, *, epochs: Epochs, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.epochs = epochs

    def __iter__(self) -> Any:
        return self.epochs.read(super().__iter__())


def _exhaust(batches: Any) -> None:
    """Draw what the order of an epoch takes, so that the next one's is another."""
    deque(batches, maxlen=0)


def _length(batches: BatchSampler) -> int | None:
    """The samples that an epoch gives, if that is known."""
    try:
        num = len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return num - num % batches.batch_size if batches.drop_last else num


def _seeded(batches: Any, seed: int, epoch: int) -> Any:
    """A copy of a sampler of batches that draws the same order in every process, and whenever it is
    asked for that of an epoch. The seed of its own generator counts for more than ours."""
    sampler: Any = getattr(batches, "sampler", None)
    own = getattr(sampler, "generator", seed)
    if isinstance(own, torch.Generator):
        seed = own.initial_seed()
    elif own is not None:
        return batches  # it does not draw, or in a way of its own
    batches, sampler = copy.copy(batches), copy.copy(sampler)
    sampler.generator = torch.Generator().manual_seed(seed + epoch)
    batches.sampler = sampler
    return batches
