"""Reader: what makes the batches of a share in; one batch after another, from a Mark on, out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from piper.bodies.leaves import batch_leaves
from piper.errors import PiperError, RunError
from piper.ir.tensor_type import Shapes
from piper.plan.types import Plan
from piper.runtime.launch.epochs import Epochs
from piper.runtime.launch.marks import Mark, decoded, encoded, is_stateful
from piper.runtime.launch.read_faults import ReadPolicy, Unreadable, pause
from piper.runtime.launch.shares import Share, checked_leaves, shapes_of

T = TypeVar("T")
Make = Callable[[Share], Iterable[Any]]
Measure = Callable[[Any], Shapes]  # the shapes of the global batch that a batch belongs to


class Fetched(msgspec.Struct, frozen=True):
    """A rank's answer: the shapes of the global batch, none at the data's end; where it stands; how
    often it had to read again, why there is no batch that could be read, and the samples of partial
    batches that were left out."""

    shapes: Shapes
    mark: Mark
    retried: int = 0
    failure: str = ""
    partial: tuple[int, ...] = ()


class Reader:
    """The batches of one data rank of several, or all rows for one of one.

    What is read begins at `mark`: a loader with a state by that; a data function that looks at
    `share.start`, or has its loader from `share.of`, by itself. Of anything else, the batches that
    were trained on are read and dropped.
    """

    def __init__(
        self,
        make: Make,
        plan: Plan,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        mark: Mark | None = None,
        measure: Measure | None = None,
        policy: ReadPolicy | None = None,
    ) -> None:
        self.make = make
        self.plan = plan
        self.rank, self.num_ranks = rank, num_ranks
        self.number = 0
        self.measure = measure or self._measured
        self.policy = policy or ReadPolicy()
        self._retried = 0
        self._mark = mark or Mark()
        self._samples = self._mark.samples
        self._rows = num_rows(plan.batch_shapes)  # of the last global batch
        self._state_before = self._mark.state  # of the coming batch, for another try
        self._fresh = True  # nothing was read since it was opened
        self._by_state = False
        self._whole = self._rows  # of the example batch
        self._partial: list[int] = []
        self._share = self._new_share()
        self._made: Iterable[Any] = ()
        self._batches: Iterator[Any] | None = None
        self._next: dict[str, Tensor] | None = None

    def open(self) -> Iterator[Any]:
        """Call what makes the batches, unless that was done."""
        if self._batches is None:
            mark = self._mark
            if mark.state is not None:
                self._made = self.make(self._share)
                self._by_state = is_stateful(self._made)
            if self._by_state:
                self._made.load_state_dict(decoded(mark.state))  # type: ignore[attr-defined, arg-type]
            else:
                self._share = self._begun(mark)
                self._made = self.make(self._share)
            self._batches = iter(self._made) if self.policy.epochs == 1 else self._passes()
        return self._batches

    def _passes(self) -> Iterator[Any]:
        """The data as often as it is to be read."""
        if self._by_state:
            raise RunError(
                "a loader that goes on by its own state has epochs of its own",
                legal="steps=N; or share.of(loader), which counts epochs",
            )
        for number in range(self.policy.epochs):
            if number and isinstance(self._made, Iterator):  # it is used up
                self._made = self.make(self._share)
            yield from self._made

    def _new_share(self, start: int = 0, epochs: Epochs | None = None) -> Share:
        whole = 0 if self.policy.partial == "refuse" else self._whole
        seed = self.plan.seed
        return Share(self.rank, self.num_ranks, seed, start, epochs=epochs, whole=whole)

    def _begun(self, mark: Mark) -> Share:
        """A share that begins at a mark; where that cannot be, at the start."""
        if mark.mixed:
            return self._new_share()
        at = (0, mark.samples) if mark.epoch is None else (mark.epoch, mark.sample)
        epochs = Epochs(seed=self.plan.seed, epoch=at[0], sample=at[1])
        return self._new_share(mark.samples, epochs)

    def begin(self) -> None:
        """Call what makes the batches before the first of them is asked for."""
        self._trying(self.open)

    def read(self) -> tuple[Any, Shapes]:
        """The next batch and the shapes of the global one; StopIteration at the data's end. What cannot
        be read is tried again, from the same sample on, then left behind."""
        try:
            return self._trying(self._read)
        except (StopIteration, PiperError):
            raise
        except Exception as failure:
            if not self.policy.skip:
                raise
            self._reopen(self._behind(failure))
            raise Unreadable(_reason(failure)) from failure

    def _trying(self, action: Callable[[], T]) -> T:
        attempt = 0
        while True:
            try:
                return action()
            except (StopIteration, PiperError):
                raise
            except Exception:
                if attempt == self.policy.again:
                    raise
                time.sleep(pause(attempt))
                attempt += 1
                self._retried += 1
                self._reopen(msgspec.structs.replace(self.mark(), state=self._state_before))

    def retried(self) -> int:
        """How often something was tried again since this was asked last."""
        num, self._retried = self._retried, 0
        return num

    def partial(self) -> list[int]:
        """The samples of partial batches that were left out since this was asked last."""
        found, self._partial = self._partial, []
        return found

    def _note_left_out(self) -> None:
        """What the share has left out since."""
        found = self._share.epochs.take_left_out()
        self._partial += found
        self._samples += sum(found)

    def _read(self) -> tuple[Any, Shapes]:
        batches = self.open()
        if self.policy.again:
            self._state_before = self.state()
        batch = next(batches, _END)
        if self._fresh and self._mark.samples and not self._at_mark():
            batch = self._after(self._mark.samples, batch, batches)
        if self._fresh and self._mark.samples and self._share.looked_at and self.policy.epochs > 1:
            raise RunError(
                "a data function that begins at share.start has one epoch",
                legal="steps=N, or share.of(loader), which counts epochs",
            )
        self._note_left_out()
        if batch is _END:
            raise StopIteration
        self.number += 1
        shapes = self.measure(batch)
        self._rows, self._fresh = num_rows(shapes), False
        self._samples += self._rows
        return batch, shapes

    def _reopen(self, mark: Mark) -> None:
        self._mark, self._batches, self._state_before = mark, None, mark.state
        self._samples, self._fresh, self._by_state = mark.samples, True, False
        self._share = self._new_share()

    def _behind(self, failure: Exception) -> Mark:
        """After the batch that cannot be read, which counts as many samples as the last one."""
        samples, epochs = self._samples + self._rows, self._share.epochs
        at = epochs.behind_next() if epochs.used else (None, 0)
        if self._by_state or self._mark.mixed or epochs.mixed or not self._share.begins or not at:
            raise RunError(
                f"{_reason(failure)}; this data cannot be read on behind it",
                legal="share.of(loader), or a data function that begins at share.start",
            ) from failure
        return Mark(samples=samples, epoch=at[0], sample=at[1])

    def _at_mark(self) -> bool:
        return self._by_state or (self._share.begins and not self._mark.mixed)

    def _after(self, samples: int, batch: Any, batches: Iterator[Any]) -> Any:
        """The first batch after so many samples, the others read and dropped."""
        num = 0
        while num < samples:
            if batch is _END:
                raise RunError(
                    f"the data ends after {num} samples, but {samples} were trained on",
                    legal="the data that was trained on",
                )
            num += num_rows(self.measure(batch))
            batch = next(batches, _END)
        if num > samples:
            raise RunError(
                f"{samples} samples were trained on, where no batch of the data ends now",
                legal="batches of the size that was trained with; or share.of(loader), or a data "
                "function that begins at share.start",
            )
        return batch

    def mark(self) -> Mark:
        """After the batch that was read last."""
        if self._fresh:
            return msgspec.structs.replace(self._mark, state=None)
        epochs = self._share.epochs
        known = epochs.used and not epochs.mixed and not self._by_state
        return Mark(
            samples=self._samples,
            epoch=epochs.epoch if known else None,
            sample=epochs.sample if known else 0,
            mixed=epochs.mixed,
        )

    def state(self) -> dict[str, Any] | None:
        """What the loader says of itself, if it does."""
        made: Any = self._made
        return encoded(made.state_dict()) if is_stateful(made) else None

    def fetch(self) -> Fetched:
        """Read the next batch, which `take` gives."""
        try:
            batch, shapes = self.read()
        except StopIteration:
            return Fetched((), self.mark(), self.retried(), partial=tuple(self.partial()))
        except Unreadable as failure:
            return Fetched((), self.mark(), self.retried(), str(failure))
        self._next = batch_leaves(batch)
        return Fetched(shapes, self.mark(), self.retried(), partial=tuple(self.partial()))

    def take(self) -> dict[str, Tensor]:
        """The batch that was fetched last."""
        if self._next is None:
            raise RunError("no batch was fetched for this step")
        leaves, self._next = self._next, None
        return leaves

    def _measured(self, batch: Any) -> Shapes:
        """Those of all data ranks' rows together, if the batch is like the example batch."""
        try:
            leaves = checked_leaves(self.plan, batch)
        except RunError as error:
            raise RunError(
                f"batch {self.number} of data rank {self.rank}: {error.message}",
                legal=error.legal,
            ) from None
        return shapes_of(self.plan, leaves, parts=self.num_ranks)


_END = object()


def fits(plan: Plan, policy: ReadPolicy, rows: int) -> bool:
    """Whether a global batch is trained on; larger ones than the example batch are, or are refused.
    All ranks must decide so together: shares that differ in their rows are no partial batch."""
    if rows >= num_rows(plan.batch_shapes) or policy.partial == "refuse":
        return True
    pieces = plan.num_data_ranks * plan.num_microbatches
    return policy.partial == "train" and rows % pieces == 0


def _reason(failure: Exception) -> str:
    """An error in one line: that of a DataLoader's process ends with what was raised there."""
    lines = str(failure).strip().splitlines() or [""]
    return lines[-1] if len(lines) > 1 else f"{type(failure).__name__}: {lines[0]}"


def num_rows(shapes: Shapes) -> int:
    """Samples of a global batch."""
    _, (rows, *_) = shapes[0]
    return rows
