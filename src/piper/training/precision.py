"""Precision: a model and its batches in float64, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from piper.bodies.leaves import map_leaves


def doubled(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def doubled_model(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make_model().double()
