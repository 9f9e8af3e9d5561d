"""Pool: what every launcher is: Members that do as they are told, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

# Who reads batches: this process for all ranks, each rank's own process, or this one for its rank.
Reading = Literal["driver", "members", "rank"]


class Pool(Protocol):
    """Members that wait for commands; many plans, one after another.

    A command is the name of a method of Member, which takes one payload: a new command to all ranks is
    one method there. `ranks` are those that this process drives; `sends` says whether payloads leave it
    and so have to be data.
    """

    num_ranks: int
    device: str
    reading: Reading
    sends: bool

    @property
    def ranks(self) -> Sequence[int]: ...

    def call(self, command: str, payloads: Sequence[Any]) -> list[Any]:
        """Give the command to every rank of `ranks`, each with its payload, and collect the answers of
        all ranks; those of steps, of `ranks` alone. A Failure ends the pool."""

    def close(self) -> None: ...
