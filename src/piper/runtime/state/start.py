"""Start: what a run begins with, and what of it a rank must be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from torch import Tensor

from piper.plan.holdings import Holding, holdings
from piper.plan.types import Plan
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.boxes import whole
from piper.stored.pieces import StoredState


class Given(NamedTuple):
    """Elements that a rank is sent since they lie in another process: by the keys of its holdings.

    `names` are all tensors that lie there."""

    names: frozenset[str]
    elements: dict[str, Tensor]


@dataclass(frozen=True)
class Start:
    """Stored tensors; `memory` has those of them that lie in this process."""

    state: StoredState
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def names(self) -> frozenset[str]:
        """The tensors that lie in this process."""
        forms = {name: {p.form for p in tensor.pieces} for name, tensor in self.state.model.items()}
        return frozenset(name for name, found in forms.items() if "memory" in found)

    def sent(self) -> bytes:
        """The index of what every process can read, as JSON."""
        model = {name: t for name, t in self.state.model.items() if name not in self.names}
        return msgspec.json.encode(msgspec.structs.replace(self.state, model=model))

    def given(self, plan: Plan, rank: int, *, known: Collection[str] = ()) -> Given:
        """What a rank of a plan holds of tensors in this process, without those that are `known` there.
        The first rank gets what no rank holds."""
        held = {
            one.key: one
            for one in holdings(plan, rank)
            if one.what in ("param", "buffer") and one.tensor not in known
        }
        if rank == 0 and not known:
            everywhere = {h.tensor for r in range(plan.mesh.size) for h in holdings(plan, r)}
            held |= {
                name: _all_of(name, tensor.shape)
                for name, tensor in plan.tensors.items()
                if name not in everywhere
            }
        reader = PieceReader(self.state.model, self.memory)
        elements = {
            key: reader.elements(unquote(one.tensor), one.box, one.first, one.last)
            for key, one in held.items()
            if unquote(one.tensor) in self.names
        }
        return Given(self.names, elements)


def _all_of(name: str, shape: tuple[int, ...]) -> Holding:
    box = whole(shape)
    return Holding("param", name, -1, 0, box, 0, box.num_elements)
