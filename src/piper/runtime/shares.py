"""Shares: which rows of the global batch belong to which data rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from piper.plan.types import Plan


def share_of(plan: Plan, leaves: Mapping[str, Tensor], data_rank: int) -> dict[str, Tensor]:
    """Sample i of a batch of B belongs to data rank i // (B / D)."""
    found = {}
    for name, leaf in leaves.items():
        rows = leaf.shape[0] // plan.num_data_ranks
        found[name] = leaf[data_rank * rows : (data_rank + 1) * rows]
    return found
