"""Transport: what a Worker asks of whatever moves bytes between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from piper.errors import RunError, did_you_mean
from piper.ir.graph import Stream
from piper.plan.slots import Slot
from piper.plan.tasks import Comm


@dataclass(frozen=True)
class Exchange:
    """One communication task of one rank, with everything decided that can be."""

    task: Comm
    stream: Stream
    rank: int
    ranks: tuple[int, ...]  # of the group, ascending
    outputs: tuple[Slot, ...]  # what it fills: one slot, or none

    @property
    def peer(self) -> int:
        """The other end of a message."""
        return self.ranks[0] if self.ranks[1] == self.rank else self.ranks[1]


def unknown_kind(transport: str, name: str, known: Iterable[str]) -> RunError:
    """A transport that has no way to move the bytes of a kind says so, and guesses nothing."""
    text = f"the {transport} transport has no {name!r}{did_you_mean(name, list(known))}"
    return RunError(text, legal=", ".join(known))


class Pending(Protocol):
    """A communication under way."""

    def ready(self) -> bool:
        """Whether `finish` would return at once."""

    def finish(self) -> list[Tensor]:
        """Wait for the end; the results, in the order of the task's writes."""


class Transport(Protocol):
    def start(
        self,
        exchange: Exchange,
        tensor: Tensor | None,
        splits: list[list[int]] | None,
        into: Tensor | None,
    ) -> Pending:
        """Begin. `splits` are the rows to send to and to receive from each rank of the group; results
        may be written to `into`, memory that stays, from now on."""
