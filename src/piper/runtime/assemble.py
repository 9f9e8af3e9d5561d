"""Assemble: the parts that ranks hold in, whole tensors of the model out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.plan.types import Plan, bind


def whole_tensors(plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of a kind of slot, put together from their parts."""
    whole = {}
    for name, parts in _copies(plan, kind, by_rank).items():
        pieces = [parts[part][0] for part in sorted(parts)]
        whole[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
    return whole


def differing_copies(plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]) -> list[str]:
    """Names of tensors whose copies are not bit-equal."""
    found = []
    for name, parts in _copies(plan, kind, by_rank).items():
        for copies in parts.values():
            if any(not torch.equal(copies[0], copy) for copy in copies[1:]):
                found.append(name)
    return found


def _copies(
    plan: Plan, kind: str, by_rank: Sequence[dict[str, Tensor]]
) -> dict[str, dict[int, list[Tensor]]]:
    """Name -> part of dim 0 -> that part on every rank that has it."""
    found: dict[str, dict[int, list[Tensor]]] = {}
    for rank, tensors in enumerate(by_rank):
        me = bind(plan, rank)
        for slot in me.slots:
            if slot.kind == kind:
                part, _ = me.part_of(slot, plan.mesh)
                copies = found.setdefault(slot.source, {}).setdefault(part, [])
                copies.append(tensors[slot.source])
    return found
