"""Given: what a rank is sent of weights that lie in the memory of the driver."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from torch import Tensor

from piper.plan.holdings import holdings
from piper.plan.types import Plan
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.stored_pieces import StoredState
from piper.stored.writers import Entry, entries_by_rank


class Given(NamedTuple):
    """Elements by the keys of a rank's holdings; `names` are all tensors that the driver has."""

    names: frozenset[str]
    elements: dict[str, Tensor]


NOTHING = Given(frozenset(), {})


def in_memory(stored: StoredState) -> frozenset[str]:
    """The tensors that lie in the driver's memory."""
    tensors = stored.model.items()
    return frozenset(n for n, t in tensors if any(p.form == "memory" for p in t.pieces))


def elsewhere(stored: StoredState) -> StoredState:
    """All others, which every process can read."""
    names = in_memory(stored)
    model = {name: tensor for name, tensor in stored.model.items() if name not in names}
    return msgspec.structs.replace(stored, model=model)


class Giver:
    """Cuts tensors in memory for the ranks of a plan."""

    def __init__(self, plan: Plan, stored: StoredState, memory: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.names = in_memory(stored)
        self.reader = PieceReader(stored.model, memory)

    def all_of(self, rank: int) -> Given:
        """What a rank holds of them, and those that no rank holds but this one writes."""
        given = self.without(rank, known=())
        for entry in self._entries[rank]:
            name = unquote(entry.tensor)
            if entry.holding < 0 and name in self.names:
                given.elements[entry.tensor] = self.reader.tensor(name).flatten()
        return given

    def without(self, rank: int, *, known: Collection[str]) -> Given:
        """What a rank holds of them, without tensors that it knows."""
        held = [one for one in holdings(self.plan, rank) if one.what in ("param", "buffer")]
        elements = {
            one.key: self.reader.elements(unquote(one.tensor), one.part, one.first, one.last)
            for one in held
            if unquote(one.tensor) in self.names and one.tensor not in known
        }
        return Given(self.names, elements)

    @cached_property
    def _entries(self) -> list[list[Entry]]:
        return entries_by_rank(self.plan)
