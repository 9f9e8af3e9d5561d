"""Restore: what optimizers kept when a run was saved, into the Worker of a rank that goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import torch
from torch import Tensor

from piper.errors import FileError
from piper.plan.holdings import Holding
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.stored_pieces import Stored, StoredState

if TYPE_CHECKING:
    from piper.runtime.worker.update import Piece, Updater
    from piper.runtime.worker.worker import Worker


def restore(worker: Worker, stored: StoredState) -> None:
    """After the model's tensors: optimizer state, moving averages, and the number of steps."""
    worker.steps.begun = worker.steps.finished = stored.steps
    worker.evaluations.begun = stored.evaluations
    if not stored.steps:
        return
    held: dict[int, list[Holding]] = {}  # by the updater
    for one in worker.holdings:
        if one.what in ("average", "state"):
            updater, _ = worker.stepping(one.slot)
            held.setdefault(id(updater), []).append(one)
    for updater in worker.updaters.values():
        _Updater(worker, updater, stored).restore(held.get(id(updater), []))


class _Updater:
    """What one bucket's optimizers kept."""

    def __init__(self, worker: Worker, updater: Updater, stored: StoredState) -> None:
        self.worker = worker
        self.updater = updater
        self.stored = stored

    def restore(self, held: list[Holding]) -> None:
        states = [self._state(number, held) for number in range(len(self.updater.pieces))]
        averages = [torch.zeros_like(average) for average in self.updater.averages]
        for one in held:
            if one.what == "average":
                _, place = self.worker.stepping(one.slot)
                self._put(averages[place], 0, one, self._values(self.stored.averages, one))
        self.updater.restore(states, averages, self.stored.steps)

    def _state(self, number: int, held: Iterable[Holding]) -> dict[str, Tensor]:
        """What is kept for one piece: of all parameters that lie in it, side by side."""
        piece = self.updater.pieces[number]
        kept: dict[str, Tensor] = {}
        for one in held:
            if one.what != "state" or not self._lies_in(piece, one):
                continue
            kept_before = self.stored.optimizer.get(unquote(one.tensor), {})
            if one.state not in kept_before:
                continue  # the optimizer had made none yet, and makes it when it first needs it
            values = self._values(kept_before, one)
            if one.form == "elements":
                stepped = self.updater.stepped[number]
                state = kept.setdefault(one.state, torch.zeros_like(stepped.detach()))
                self._put(state, piece.begin, one, values)
            elif not torch.equal(kept.setdefault(one.state, values), values):
                raise FileError(
                    f"{unquote(one.tensor)} has another {one.state} than parameters that are stepped "
                    "together with it here",
                    legal="parameter groups as in the run that was saved",
                )
        return kept

    def _lies_in(self, piece: Piece, held: Holding) -> bool:
        _, place = self.worker.stepping(held.slot)
        return place == piece.place and piece.begin <= held.offset < piece.end

    def _values(self, stored: Stored, held: Holding) -> Tensor:
        """A holding's elements, or all of what has a shape of its own."""
        key = held.state if held.what == "state" else unquote(held.tensor)
        reader = PieceReader(stored)
        if held.form != "elements":
            return reader.tensor(key)
        return reader.elements(key, held.part, held.first, held.last)

    def _put(self, into: Tensor, begin: int, held: Holding, values: Tensor) -> None:
        at = held.offset - begin
        into.view(-1)[at : at + values.numel()].copy_(values)
