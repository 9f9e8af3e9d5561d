"""Data: what the user gives as data and a run in, a batch for each of its steps out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from piper.api.run import Run
from piper.bodies.leaves import join_batches
from piper.errors import RunError
from piper.ir.tensor_type import Shapes
from piper.plan.types import Plan
from piper.runtime.launch.marks import Mark
from piper.runtime.launch.pool_run import check_ends
from piper.runtime.launch.reader import Reader
from piper.runtime.launch.reading import place_of
from piper.runtime.launch.shares import Share, agreed_shapes, checked_leaves, shapes_of
from piper.training.position import Position

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


class MadeBatches:
    """What a function makes when it is called again and again, with a new number if it takes one.

    Otherwise torch's own randomness gets the number, so that every process makes the same.
    """

    def __init__(self, make: Callable[..., Any], *, seed: int) -> None:
        self.make = make
        self.number = seed
        self.takes = bool(inspect.signature(make).parameters)

    def __iter__(self) -> Iterator[Any]:
        while True:
            torch.manual_seed(self.number)
            batch = self.make(self.number) if self.takes else self.make()
            self.number += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Batches:
    """A batch for each step until the data ends; None where the ranks read their rows themselves.

    It begins at `start`. Under torchrun every rank has one, and all call the same methods.
    """

    def __init__(
        self, run: Run, data: Any, *, name: str = "train", start: Position | None = None
    ) -> None:
        check_data(data)
        self._source = _source_of(run, data, name, start or Position())
        self._position = start or Position()
        self._ahead = False  # whether a batch was given that no step has trained on

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._source.next()
        self._ahead = True
        return batch

    def trained(self) -> None:
        """A step has trained on the last batch."""
        mark, self._ahead = self._source.mark, False
        self._position = Position(
            steps=self._position.steps + 1,
            samples=mark.samples,
            epoch=mark.epoch,
            sample=mark.sample,
            mixed=mark.mixed,
        )

    def position(self, *, states: bool = True) -> Position:
        """After the last batch that was trained on. The states of loaders are asked of the ranks that
        read; there are none of them while a batch is given and not trained on."""
        if not states or self._ahead or self._position.states:
            return self._position
        whole, found = self._source.states()
        known = tuple(state for state in found if state is not None)
        if len(known) != len(found):
            return self._position
        return msgspec.structs.replace(self._position, states=known, whole=whole)


class _Source(Protocol):
    mark: Mark  # after the last batch

    def next(self) -> Any:
        """A batch for the coming step; StopIteration at the data's end."""

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        """What loaders say of themselves, and whether there is one for all data ranks."""


def _source_of(run: Run, data: Any, name: str, start: Position) -> _Source:
    reading, whole = run.workers.reading, not callable(data)
    marks = start.marks(run.plan.num_data_ranks, whole=whole)
    if reading == "rank":
        return _OfThisRank(run, data, name, start)
    if reading == "members" and not whole:
        return _OfMembers(run, data, name, marks)
    return _OfDriver(run.plan, data, marks)


def _ordered(data: Any) -> Callable[[Share], Iterable[Any]]:
    """What gives the batches of a share. A DataLoader shuffles by the plan's seed, so that every
    launcher sees the same order; of another iterable all rows come."""
    if callable(data):
        return data
    if not isinstance(data, DataLoader):
        return lambda share: data
    if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
        return lambda share: data
    return lambda share: share.of(data)


class _OfDriver:
    """All ranks are in this process, or it sends them their rows: it reads global batches, or every
    share, and puts the rows together."""

    def __init__(self, plan: Plan, data: Any, marks: Sequence[Mark]) -> None:
        num, self.whole = len(marks), not callable(data)

        def measure(batch: Any) -> Shapes:
            return shapes_of(plan, checked_leaves(plan, batch), parts=num)

        self.readers = [
            Reader(_ordered(data), plan, rank=rank, num_ranks=num, mark=mark, measure=measure)
            for rank, mark in enumerate(marks)
        ]
        self.mark = marks[0]

    def next(self) -> Any:
        found = [_next(reader) for reader in self.readers]
        more = {rank: one for rank, one in enumerate(found) if one is not None}
        check_ends(list(more), [rank for rank, one in enumerate(found) if one is None])
        if not more:
            raise StopIteration
        agreed_shapes({rank: shapes for rank, (_, shapes) in more.items()})
        self.mark = self.readers[0].mark()
        batches = [batch for batch, _ in more.values()]
        return batches[0] if len(batches) == 1 else join_batches(batches)

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        return self.whole, [reader.state() for reader in self.readers]


class _OfMembers:
    """Every rank's own process reads."""

    def __init__(self, run: Run, data: Any, name: str, marks: Sequence[Mark]) -> None:
        self.run, self.name, self.mark = run, name, marks[0]
        run.read(data, name=name, marks=marks)

    def next(self) -> None:
        if not self.run.fetch(name=self.name):
            raise StopIteration
        self.mark = self.run.workers.marks[self.name]

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        return False, _states_of_ranks(self.run, self.name)


class _OfThisRank:
    """This process is one rank: it reads for itself, and all agree on whether there is a batch."""

    def __init__(self, run: Run, data: Any, name: str, start: Position) -> None:
        self.run, self.data, self.name = run, data, name
        pool: Any = run.workers.pool
        self.pool = pool
        pool.reads_data = pool.num_ranks > 1
        [me], num = run.workers.ranks["train"], run.plan.num_data_ranks
        self.whole = not callable(data) and start.whole
        mark = start.marks(num, whole=self.whole)[0 if self.whole else me.data_rank]
        self.mark, self.reader = mark, None
        if any(slot.kind == "batch" for slot in me.slots):
            make = _ordered(data)
            self.reader = Reader(
                make, run.plan, rank=me.data_rank, num_ranks=num, mark=mark, measure=self._measured
            )
        pool.member.readers[name] = self.reader

    def _measured(self, batch: Any) -> Shapes:
        leaves, shapes = self.run.checked(batch, self.name)
        self.whole = not callable(self.data) and shapes == shapes_of(self.run.plan, leaves)
        return shapes

    def next(self) -> Any:
        status, batch, failure = IDLE, None, None
        if self.reader:
            try:
                with self.pool.waiting_for(place_of(self.data)):
                    batch, _ = self.reader.read()
                status = READ
            except StopIteration:
                status = ENDED
            except Exception as error:
                status, failure = FAILED, error
        mark = self.reader.mark() if self.reader else self.mark
        numbers = (
            mark.samples,
            -1 if mark.epoch is None else mark.epoch,
            mark.sample,
            int(mark.mixed),
        )
        answers = self.pool.agree(status, int(self.whole), *numbers)
        found = [answer[0] for answer in answers]
        if FAILED in found:
            self.pool.stop(failure)
        check_ends(
            [rank for rank, other in enumerate(found) if other == READ],
            [rank for rank, other in enumerate(found) if other == ENDED],
        )
        if ENDED in found:
            raise StopIteration
        whole, samples, epoch, sample, mixed = answers[found.index(READ)][1:]
        self.whole = bool(whole)
        self.mark = Mark(
            samples=samples, epoch=None if epoch < 0 else epoch, sample=sample, mixed=bool(mixed)
        )
        return batch

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        found = _states_of_ranks(self.run, self.name)
        return self.whole, found[:1] if self.whole else found


def _states_of_ranks(run: Run, name: str) -> list[dict[str, Any] | None]:
    """By data rank: of the first rank that reads its rows."""
    found: dict[int, dict[str, Any] | None] = {}
    for answer in run.workers.call("loader_state", name):
        if answer is not None:
            found.setdefault(*answer)
    return [found[rank] for rank in sorted(found)]


def _next(reader: Reader) -> tuple[Any, Shapes] | None:
    try:
        return reader.read()
    except StopIteration:
        return None
