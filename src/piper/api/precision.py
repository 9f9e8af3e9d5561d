"""Precision: a model and its batches in float64, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def doubled(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""

    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.float64) if floating else leaf

    return pytree.tree_map(convert, batch)


def doubled_model(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make_model().double()
