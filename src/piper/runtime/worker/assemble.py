"""Assemble: the elements that ranks hold in, whole tensors of the model out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from piper.errors import RunError
from piper.plan.holdings import Holding, What, holdings
from piper.plan.types import Plan
from piper.runtime.state.patch_views import patch_view
from piper.stored.boxes import patches_in

ByRank = Sequence[dict[str, Tensor]]  # per rank, its elements by the keys of its holdings


def whole_tensors(plan: Plan, what: What, by_rank: ByRank) -> dict[str, Tensor]:
    """All tensors of a kind, put together."""
    return {name: puzzle.whole() for (name, _), puzzle in _puzzles(plan, what, by_rank).items()}


def differing_copies(plan: Plan, what: What, by_rank: ByRank) -> list[str]:
    """Names of tensors that are not bit-equal wherever several ranks hold the same elements."""
    found = _puzzles(plan, what, by_rank).items()
    return [name for (name, _), puzzle in found if puzzle.differs]


def whole_state(plan: Plan, by_rank: ByRank) -> dict[str, dict[str, Tensor]]:
    """Per trained parameter, each piece of optimizer state by its name."""
    trained = [name for bucket in plan.buckets if bucket.trained for name in bucket.params]
    found: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
    for (name, state), puzzle in _puzzles(plan, "state", by_rank).items():
        found[name][state] = puzzle.whole()
    return found


def _puzzles(plan: Plan, what: What, by_rank: ByRank) -> dict[tuple[str, str], _Puzzle]:
    """(tensor, piece of state) -> its elements from all ranks."""
    found: dict[tuple[str, str], list[tuple[Holding, Tensor]]] = defaultdict(list)
    for held, tensor in _pieces(plan, what, by_rank):
        found[held.tensor, held.state].append((held, tensor))
    return {
        (name, state): _Puzzle(name, plan.tensors[name].shape, pieces)
        for (name, state), pieces in found.items()
    }


def _pieces(plan: Plan, what: What, by_rank: ByRank) -> Iterator[tuple[Holding, Tensor]]:
    for rank, mine in enumerate(by_rank):
        for held in holdings(plan, rank) if mine else ():
            if held.what == what and held.key in mine:
                yield held, mine[held.key]


class _Puzzle:
    """The elements of one tensor, as ranks hold them."""

    def __init__(
        self, name: str, shape: tuple[int, ...], pieces: list[tuple[Holding, Tensor]]
    ) -> None:
        self.name = name
        self.differs = False
        first, value = pieces[0]
        alone = first.form != "elements"  # of no shape that could be cut: each holder has all of it
        self._whole = torch.empty(value.shape if alone else shape, dtype=value.dtype)
        self._known = torch.zeros(self._whole.shape, dtype=torch.bool)
        for held, tensor in pieces:
            if alone:
                self._put((), tensor.detach().cpu())
                continue
            mine = tensor.detach().cpu().reshape(-1)
            for patch in patches_in(held.part, held.first, held.last):
                self._put(patch.box.slices, patch_view(mine, patch))
        self._missing = int((~self._known).sum())
        del self._known

    def _put(self, box: tuple[slice, ...], mine: Tensor) -> None:
        """Set the elements that are not known yet, and compare the others bit by bit."""
        whole, known = self._whole[box], self._known[box]
        self.differs |= not torch.equal(whole[known], mine[known])
        whole.copy_(torch.where(known, whole, mine))
        known.fill_(True)

    def whole(self) -> Tensor:
        if self._missing:
            num, of = self._missing, self._whole.numel()
            raise RunError(f"no rank holds {num} of {of} elements of {self.name}")
        return self._whole
