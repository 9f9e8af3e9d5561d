"""Sources: a run and its data in, a batch for each step out, by who reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from piper.api.run import Run
from piper.bodies.leaves import join_batches
from piper.ir.tensor_type import Shapes
from piper.plan.types import Plan
from piper.runtime.launch.marks import Mark
from piper.runtime.launch.pool_run import check_ends
from piper.runtime.launch.read_faults import ReadFaults, ReadPolicy, Unreadable
from piper.runtime.launch.reader import Reader, fits, num_rows
from piper.runtime.launch.reading import place_of
from piper.runtime.launch.shares import Share, agreed_shapes, checked_leaves, shapes_of
from piper.training.position import Position
from piper.training.slow_data import SlowData

ENDED, READ, FAILED, IDLE, UNREADABLE = range(5)


class Source(Protocol):
    mark: Mark  # after the last batch
    faults: ReadFaults

    def next(self) -> Any:
        """A batch for the coming step; StopIteration at the data's end."""

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        """What loaders say of themselves, and whether there is one for all data ranks."""


def source_of(run: Run, data: Any, name: str, start: Position, policy: ReadPolicy) -> Source:
    reading, whole = run.workers.reading, not callable(data)
    marks = start.marks(run.plan.num_data_ranks, whole=whole)
    if reading == "rank":
        return _OfThisRank(run, data, name, start, policy)
    if reading == "members" and not whole:
        return _OfMembers(run, data, name, marks, policy)
    timeout = getattr(run.workers.pool, "timeout", None)
    watch = SlowData(place_of(data), timeout) if timeout else None
    return _OfDriver(run.plan, data, marks, policy, watch)


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

    def __init__(
        self,
        plan: Plan,
        data: Any,
        marks: Sequence[Mark],
        policy: ReadPolicy,
        watch: SlowData | None = None,
    ) -> None:
        self.watch = watch
        self.plan, self.faults = plan, ReadFaults(policy)
        num, self.whole = len(marks), not callable(data)

        def measure(batch: Any) -> Shapes:
            return shapes_of(plan, checked_leaves(plan, batch), parts=num)

        self.readers = [
            Reader(
                _ordered(data),
                plan,
                rank=rank,
                num_ranks=num,
                mark=mark,
                measure=measure,
                policy=policy,
            )
            for rank, mark in enumerate(marks)
        ]
        self.mark = marks[0]

    def next(self) -> Any:
        while True:
            batch, rows = self._together()
            if fits(self.plan, self.faults.policy, rows):
                return batch
            self.faults.partial.append(rows)

    def _together(self) -> tuple[Any, int]:
        """The batches of all readers as one, and its samples."""
        found = [self._next(reader) for reader in self.readers]
        while failures := {
            r: str(one) for r, one in enumerate(found) if isinstance(one, Unreadable)
        }:
            self.faults.leave_out(failures)
            found = [self._next(reader) for reader in self.readers]
        more = {rank: one for rank, one in enumerate(found) if isinstance(one, tuple)}
        check_ends(list(more), [rank for rank, one in enumerate(found) if one is None])
        if not more:
            raise StopIteration
        shapes = agreed_shapes({rank: shapes for rank, (_, shapes) in more.items()})
        self.mark = self.readers[0].mark()
        batches = [batch for batch, _ in more.values()]
        whole = batches[0] if len(batches) == 1 else join_batches(batches)
        return whole, num_rows(shapes)

    def _next(self, reader: Reader) -> tuple[Any, Shapes] | Unreadable | None:
        try:
            with self.watch.watched() if self.watch else nullcontext():
                return reader.read()
        except StopIteration:
            return None
        except Unreadable as failure:
            return failure
        finally:
            self.faults.retried += reader.retried()
            left_out = reader.partial()
            self.faults.partial += left_out if reader is self.readers[0] else []

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        return self.whole, [reader.state() for reader in self.readers]


class _OfMembers:
    """Every rank's own process reads."""

    def __init__(
        self, run: Run, data: Any, name: str, marks: Sequence[Mark], policy: ReadPolicy
    ) -> None:
        self.run, self.name, self.mark = run, name, marks[0]
        run.read(data, name=name, marks=marks, policy=policy)
        self.faults = run.workers.read_faults[name]

    def next(self) -> None:
        if not self.run.fetch(name=self.name):
            raise StopIteration
        self.mark = self.run.workers.marks[self.name]

    def states(self) -> tuple[bool, list[dict[str, Any] | None]]:
        return False, _states_of_ranks(self.run, self.name)


class _OfThisRank:
    """This process is one rank: it reads for itself, and all agree on whether there is a batch."""

    def __init__(self, run: Run, data: Any, name: str, start: Position, policy: ReadPolicy) -> None:
        self.faults = ReadFaults(policy)
        self.run, self.data, self.name = run, data, name
        pool: Any = run.workers.pool
        self.pool = pool
        pool.reads_data = pool.num_ranks > 1
        [me], num = run.workers.ranks["train"], run.plan.num_data_ranks
        self.whole = not callable(data) and start.whole
        mark = start.marks(num, whole=self.whole)[0 if self.whole else me.data_rank]
        self.mark, self.reader, self.rows = mark, None, 0
        if any(slot.kind == "batch" for slot in me.slots):
            self.reader = Reader(
                _ordered(data),
                run.plan,
                rank=me.data_rank,
                num_ranks=num,
                mark=mark,
                measure=self._measured,
                policy=policy,
            )
        pool.member.readers[name] = self.reader

    def _measured(self, batch: Any) -> Shapes:
        leaves, shapes = self.run.checked(batch, self.name)
        self.whole = not callable(self.data) and shapes == shapes_of(self.run.plan, leaves)
        return shapes

    def next(self) -> Any:
        while True:
            batch, rows = self._together()
            # Shares that differ in their rows are refused by the step.
            if len(rows) > 1 or fits(self.run.plan, self.faults.policy, *rows):
                return batch
            self.faults.partial += rows

    def _together(self) -> tuple[Any, set[int]]:
        """This rank's batch, and the samples of the global one as ranks have measured them."""
        while True:
            status, batch, failure = self._read()
            mark = self.reader.mark() if self.reader else self.mark
            retried = self.reader.retried() if self.reader else 0
            self.faults.partial += self.reader.partial() if self.reader else []
            epoch = -1 if mark.epoch is None else mark.epoch
            numbers = (mark.samples, epoch, mark.sample, int(mark.mixed), self.rows)
            answers = self.pool.agree(status, retried, int(self.whole), *numbers)
            found = [answer[0] for answer in answers]
            self.faults.retried += sum(answer[1] for answer in answers)
            if FAILED in found:
                self.pool.stop(failure)
            if UNREADABLE not in found:
                break
            texts = self.pool.gather(str(failure) if failure else "")
            self.faults.leave_out({rank: text for rank, text in enumerate(texts) if text})
        check_ends(
            [rank for rank, other in enumerate(found) if other == READ],
            [rank for rank, other in enumerate(found) if other == ENDED],
        )
        if ENDED in found:
            raise StopIteration
        whole, samples, epoch, sample, mixed, _ = answers[found.index(READ)][2:]
        self.whole = bool(whole)
        self.mark = Mark(
            samples=samples, epoch=None if epoch < 0 else epoch, sample=sample, mixed=bool(mixed)
        )
        return batch, {answer[-1] for answer in answers if answer[0] == READ}

    def _read(self) -> tuple[int, Any, Exception | None]:
        if self.reader is None:
            return IDLE, None, None
        try:
            with self.pool.waiting_for(place_of(self.data)):
                batch, shapes = self.reader.read()
            self.rows = num_rows(shapes)
            return READ, batch, None
        except StopIteration:
            return ENDED, None, None
        except Unreadable as failure:
            return UNREADABLE, None, failure
        except Exception as failure:
            return FAILED, None, failure

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
