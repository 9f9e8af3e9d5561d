"""Leaves: the tensors of a batch, by the name of their place in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def batch_leaves(batch: Any) -> dict[str, Tensor]:
    """`{"x": [a, b]}` -> `{"batch.x.0": a, "batch.x.1": b}`; what is no tensor is left out."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    found = {}
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            found["batch" + "".join(_path_word(key) for key in path)] = leaf
    return found


def map_leaves(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same batch with a function applied to each of its tensors."""
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _path_word(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return f".{getattr(key, attribute)}"
    return f".{key}"
