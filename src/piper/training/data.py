"""Data: what the user gives as data and a run in, a batch for each of its steps out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import msgspec
import torch
from torch.utils.data import DataLoader

from piper.api.run import Run
from piper.errors import RunError
from piper.runtime.launch.marks import is_stateful
from piper.runtime.launch.read_faults import ReadFaults, ReadPolicy
from piper.runtime.launch.shares import Share, refuse_replicas
from piper.training.position import Position
from piper.training.sources import source_of

Last = Literal["train", "drop"]  # what becomes of batches that are smaller than others
Data = Iterable[Any] | Callable[[Share], Iterable[Any]]


def check_data(data: Any) -> None:
    """Raise unless it is something that batches can be read from."""
    legal = "an iterable of global batches, a DataLoader of them, or a function data(share)"
    if isinstance(data, Mapping | torch.Tensor):
        raise RunError(f"data is one batch, a {type(data).__name__}", legal=f"[batch]; {legal}")
    if isinstance(data, DataLoader):
        refuse_replicas(data)
    if not callable(data) and not isinstance(data, Iterable):
        raise RunError(f"data is {type(data).__name__}", legal=legal)


def check_policy(data: Any, policy: ReadPolicy) -> None:
    """Raise unless the data can be read so."""
    if policy.again < 0 or policy.skip < 0:
        raise RunError(
            f"read_again={policy.again}, skip_unreadable={policy.skip}", legal="0 or more"
        )
    one_way = isinstance(data, Iterator) and not is_stateful(data)
    if one_way and (policy.again or policy.skip):
        raise RunError(
            "data that can be read only once is not read again after an error",
            legal="a list or DataLoader of global batches, or a function data(share)",
        )


def check_epochs(data: Any, steps: int | None, epochs: int | None, last: str) -> None:
    """Raise unless data can be read for so many steps, or epochs."""
    if last not in get_args(Last):
        raise RunError(f"last={last!r}", legal=", ".join(f'"{word}"' for word in get_args(Last)))
    if epochs is None:
        return
    if not isinstance(epochs, int) or epochs < 1:
        raise RunError(f"epochs={epochs!r}", legal="at least 1")
    if steps is not None:
        raise RunError(f"steps={steps} and epochs={epochs}", legal="one of the two")
    if epochs > 1:
        check_again(data)


def check_again(data: Any) -> None:
    """Raise unless it can be read several times."""
    check_data(data)
    if not callable(data) and isinstance(data, Iterator):
        raise RunError(
            "the data can be read only once",
            legal="a list or DataLoader of global batches, or a function data(share)",
        )


def rewinding(data: Any) -> Callable[[], None]:
    """What takes a loader that knows where it stands back to where it stands now."""
    if not is_stateful(data):
        return lambda: None
    state = copy.deepcopy(data.state_dict())
    return lambda: data.load_state_dict(copy.deepcopy(state))


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
        self,
        run: Run,
        data: Any,
        *,
        name: str = "train",
        start: Position | None = None,
        policy: ReadPolicy | None = None,
    ) -> None:
        check_data(data)
        self._source = source_of(run, data, name, start or Position(), policy or ReadPolicy())
        self._position = start or Position()
        self._ahead = False  # whether a batch was given that no step has trained on

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._source.next()
        self._ahead = True
        return batch

    @property
    def faults(self) -> ReadFaults:
        """What could not be read."""
        return self._source.faults

    def trained(self, *, skipped: bool = False) -> None:
        """A step has trained on the last batch, or was skipped for what is in it."""
        mark, self._ahead = self._source.mark, False
        self._position = Position(
            steps=self._position.steps + (not skipped),
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
