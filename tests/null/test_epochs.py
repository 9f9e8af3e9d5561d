"""Shares of loaders from a sample on: every sample once, whatever ranks and batches were before."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import piper
from piper.errors import RunError
from piper.runtime.launch.epochs import Epochs
from piper.runtime.launch.marks import decoded, encoded
from tests.counted import NUM, Numbers, loader


def _global(seed: int, start: int, num_ranks: int, num_batches: int, **options: Any) -> list[int]:
    """The samples of some global batches, read by all shares over as many epochs as it takes."""
    readers = [
        _endless(piper.Share(rank, num_ranks, seed, start), options) for rank in range(num_ranks)
    ]
    batches = [list(islice(reader, num_batches)) for reader in readers]
    return [int(i) for rows in zip(*batches, strict=True) for row in rows for i in row["ids"]]


def _endless(share: piper.Share, options: dict[str, Any]) -> Iterator[Any]:
    while True:
        yield from share.of(loader(**options))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_share_begins_at_any_sample_of_any_epoch(shuffle: bool) -> None:
    stream = _global(5, 0, 1, 3 * NUM, size=1, shuffle=shuffle)
    for epoch in range(3):
        assert sorted(stream[epoch * NUM : (epoch + 1) * NUM]) == list(range(NUM))
    assert (stream[:NUM] == stream[NUM : 2 * NUM]) is not shuffle  # each epoch has another order
    for start, ranks, size in (
        (8, 2, 8),
        (12, 4, 4),
        (36, 2, 4),
        (40, 1, 8),
        (52, 2, 4),
        (80, 4, 8),
    ):
        found = _global(5, start, ranks, 3, size=size, shuffle=shuffle)
        assert found == stream[start : start + 3 * size], (start, ranks, size)


def test_no_sample_before_the_start_is_read() -> None:
    Numbers.read.clear()
    found = _global(5, 52, 2, 2, size=4)
    assert sorted(Numbers.read) == sorted(found) and len(found) == 8


def test_worker_processes_of_a_loader_read_on_from_the_start() -> None:
    options = {"size": 8, "num_workers": 1}
    assert _global(5, 24, 2, 2, **options) == _global(5, 24, 1, 2, size=8)


def _share(epochs: Epochs, num_ranks: int = 1) -> piper.Share:
    return piper.Share(0, num_ranks, 5, epochs=epochs)


def test_epochs_of_dropped_rests_are_counted_by_the_batches_that_were_read() -> None:
    """40 samples in batches of 12 without a rest are 36, in batches of 4 they are 40."""
    first = Epochs(seed=5)
    reader = _endless(_share(first), {"size": 12, "drop_last": True})
    before = [row for batch in islice(reader, 4) for row in batch["ids"].tolist()]
    assert (first.epoch, first.sample, first.mixed) == (1, 12, False)
    after = Epochs(seed=5, epoch=first.epoch, sample=first.sample)
    reader = _endless(_share(after), {"size": 4, "drop_last": True})
    rest = [row for batch in islice(reader, 7) for row in batch["ids"].tolist()]
    assert sorted(before[36:] + rest) == list(range(NUM)) and after.epoch == 1
    next(reader)
    assert (after.epoch, after.sample) == (2, 4)


def test_a_sampler_ahead_of_the_reader_does_not_count() -> None:
    epochs = Epochs(seed=5)
    reader = iter(_share(epochs).of(loader(4, num_workers=2, prefetch_factor=3)))
    next(reader)
    assert (epochs.epoch, epochs.sample) == (0, 4)


def test_a_generator_of_the_users_own_draws_on() -> None:
    def endless(share: piper.Share) -> Iterator[Any]:
        given = loader(8, generator=torch.Generator().manual_seed(9))
        while True:
            yield from share.of(given)

    whole = [batch["ids"].tolist() for batch in islice(endless(piper.Share(0, 1)), 15)]
    for start in (3, 5, 12):
        share = piper.Share(0, 1, start=8 * start)
        assert [b["ids"].tolist() for b in islice(endless(share), 3)] == whole[start : start + 3]


class _Pairs(BatchSampler):
    """Batches of a sampler of the user's own."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(NUM)), 4, False)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, NUM // 2, 2):
            yield [first, first + 1, first + NUM // 2, first + NUM // 2 + 1]


def test_batches_of_a_samplers_own_are_left_out_whole() -> None:
    given = DataLoader(Numbers(), batch_sampler=_Pairs())
    share = piper.Share(0, 2, start=8)
    assert next(iter(share.of(given)))["ids"].tolist() == [4, 5]
    with pytest.raises(RunError, match="sample 6 of the epoch, which lies inside of a batch"):
        next(iter(piper.Share(0, 2, start=6).of(given)))


def test_loaders_that_are_read_at_a_time_are_noticed() -> None:
    def both(share: piper.Share) -> Iterator[Any]:
        yield from zip(share.of(loader(8)), share.of(loader(8)), strict=True)

    share = piper.Share(0, 1)
    next(both(share))
    assert share.epochs.mixed
    with pytest.raises(RunError, match="several loaders that are read at a time"):
        next(both(piper.Share(0, 1, start=8)))
    share = piper.Share(0, 1)
    for _ in range(2):  # left before its end
        list(islice(share.of(loader(8)), 2))
    assert share.epochs.mixed


def test_share_start_and_share_of_are_two_ways_to_begin() -> None:
    share = piper.Share(0, 1, start=8)
    assert share.start == 8 and share.begins
    with pytest.raises(RunError, match=r"reads share\.start, after which .* by itself"):
        share.of(loader(8))
    share = piper.Share(0, 1, start=8)
    share.of(loader(8))
    with pytest.raises(RunError, match="legal: one of the two"):
        print(share.start)


@pytest.mark.parametrize(
    "state", [{"a": [1, 2.5, None, "x"]}, {"t": (1, 2)}, {1: torch.arange(3)}, {"n": float("nan")}]
)
def test_states_of_loaders_come_back_as_they_were(state: dict[Any, Any]) -> None:
    saved = encoded(state)
    assert set(saved) == {"json" if "a" in state else "torch"}
    assert repr(decoded(saved)) == repr(state)


def test_states_that_cannot_be_saved_or_read_are_one_error() -> None:
    with pytest.raises(RunError, match=r"state_dict.. of a loader or scheduler cannot be saved"):
        encoded({"file": open})
    for bad in ({"torch": "!"}, {"torch": "AAAA"}, {}):
        with pytest.raises(RunError, match="saved state of a loader is damaged"):
            decoded(bad)
