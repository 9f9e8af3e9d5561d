"""Data: what the user gives as data and a run in, a batch for each of its steps out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from piper.api.run import Run
from piper.bodies.leaves import join_batches
from piper.errors import RunError
from piper.runtime.launch.pool_run import check_ends
from piper.runtime.launch.reading import place_of
from piper.runtime.launch.shares import Share, agreed_shapes, checked_leaves, shapes_of

Data = Iterable[Any] | Callable[[Share], Iterable[Any]]
ENDED, READ, FAILED, IDLE = range(4)


def check_data(data: Any) -> None:
    """Raise unless it is something that batches can be read from."""
    if not callable(data) and not isinstance(data, Iterable):
        raise RunError(
            f"data is {type(data).__name__}",
            legal="an iterable of global batches, a DataLoader of them, or a function data(share)",
        )


def check_again(data: Any) -> None:
    """Raise unless it can be read several times."""
    check_data(data)
    if not callable(data) and iter(data) is data:
        raise RunError(
            "the data to evaluate can be read only once",
            legal="a list or DataLoader of global batches, or a function data(share)",
        )


def made_batches(make: Callable[..., Any], *, seed: int) -> Iterator[Any]:
    """What a function makes when it is called again and again, with a new number if it takes one.

    Otherwise torch's own randomness gets the number, so that every process makes the same.
    """
    takes = bool(inspect.signature(make).parameters)
    for number in itertools.count(seed):
        torch.manual_seed(number)
        yield make(number) if takes else make()


def batches(run: Run, data: Any, *, name: str = "train") -> Iterator[Any]:
    """A batch for each step until the data ends; None where the ranks read their rows themselves."""
    check_data(data)
    reading = run.workers.reading
    if reading == "rank":
        yield from _of_this_rank(run, data, name)
    elif not callable(data):
        yield from _ordered(data, Share(0, 1, run.plan.seed))
    elif reading == "members":
        run.read(data, name=name)
        while run.fetch(name=name):
            yield None
    else:
        yield from _of_all_shares(run, data)


def _ordered(data: Iterable[Any], share: Share) -> Iterable[Any]:
    """Batches of a share. A DataLoader shuffles by the plan's seed, so that every launcher sees the
    same order; of another iterable all rows come."""
    if not isinstance(data, DataLoader):
        return data
    if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
        return data
    return share.of(data)


def _of_all_shares(run: Run, data: Callable[[Share], Iterable[Any]]) -> Iterator[Any]:
    """All ranks are in this process: read every share, and put the rows together."""
    num = run.plan.num_data_ranks
    readers = [iter(data(Share(rank, num, run.plan.seed))) for rank in range(num)]
    while True:
        found = [next(reader, None) for reader in readers]
        more = [rank for rank, batch in enumerate(found) if batch is not None]
        check_ends(more, [rank for rank in range(num) if rank not in more])
        if not more:
            return
        agreed_shapes(
            {rank: shapes_of(run.plan, checked_leaves(run.plan, found[rank])) for rank in more}
        )
        yield join_batches(found)


def _of_this_rank(run: Run, data: Any, name: str) -> Iterator[Any]:
    """This process is one rank: it reads for itself, and all agree on whether there is a batch."""
    pool: Any = run.workers.pool
    pool.reads_data = pool.num_ranks > 1
    [me], plan = run.workers.ranks["train"], run.plan
    reads = any(slot.kind == "batch" for slot in me.slots)
    share = Share(me.data_rank, plan.num_data_ranks, plan.seed)
    reader = _begun_late(lambda: data(share) if callable(data) else _ordered(data, share))
    while True:
        status, batch, failure = READ, None, None
        try:
            if reads:
                with pool.waiting_for(place_of(data)):
                    batch = next(reader)
                run.checked(batch, name)
        except StopIteration:
            status = ENDED
        except Exception as error:
            status, failure = FAILED, error
        found = pool.agree(status if reads else IDLE)
        if FAILED in found:
            pool.stop(failure)
        check_ends(
            [rank for rank, other in enumerate(found) if other == READ],
            [rank for rank, other in enumerate(found) if other == ENDED],
        )
        if ENDED in found:
            return
        yield batch


def _begun_late(make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """What fails when it is made fails when it is first read."""
    yield from make()
