"""Audit: the index of a saved run in, what is wrong with its files out. All of it is read."""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import FileError
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.stored_pieces import Stored, StoredState


def audit(state: StoredState) -> list[str]:
    """A line for each tensor whose elements cannot all be read as they were written."""
    found = []
    for stored in _sections(state):
        reader = PieceReader(stored)
        for name in stored:
            try:
                reader.tensor(name)
            except FileError as error:
                found.append(error.message)
    return found


def _sections(state: StoredState) -> Iterator[Stored]:
    yield state.model
    yield state.averages
    yield from state.optimizer.values()
