"""Leaves: the tensors of a batch, by the name of their place in it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.ir.tensor_type import Shapes


def _opened(batch: Any) -> Any:
    """The batch, after torch has been told how to look into dictionaries of its own types.

    A `UserDict` (transformers' BatchEncoding) is to torch a thing without parts.
    """
    if isinstance(batch, UserDict):
        kind = type(batch)
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                lambda held: (list(held.data.values()), tuple(held.data)),
                partial(_with_data, kind),
                flatten_with_keys_fn=lambda held: (
                    [(pytree.MappingKey(key), value) for key, value in held.data.items()],
                    tuple(held.data),
                ),
            )
        for value in batch.data.values():
            _opened(value)
    elif isinstance(batch, dict):
        for value in batch.values():
            _opened(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _opened(value)
    return batch


def _with_data(kind: type[UserDict[Any, Any]], values: Iterable[Any], keys: Iterable[Any]) -> Any:
    made = kind()
    made.data = dict(zip(keys, values, strict=True))
    return made


def batch_leaves(batch: Any) -> dict[str, Tensor]:
    """`{"x": [a, b]}` -> `{"batch:x.0": a, "batch:x.1": b}`; what is no tensor is left out."""
    leaves, _ = pytree.tree_flatten_with_path(_opened(batch))
    return {leaf_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def batch_others(batch: Any) -> dict[str, Any]:
    """What is no tensor in a batch."""
    leaves, _ = pytree.tree_flatten_with_path(_opened(batch))
    return {leaf_name(path): leaf for path, leaf in leaves if not isinstance(leaf, Tensor)}


def batch_constants(batch: Any) -> dict[str, str]:
    """What is no tensor in a batch, printed: it is part of the traced code."""
    return {name: repr(leaf) for name, leaf in batch_others(batch).items()}


def map_leaves(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same batch with a function applied to each of its tensors."""
    return pytree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, _opened(batch)
    )


def with_shapes(batch: Any, shapes: Shapes) -> Any:
    """The same batch with leaves of other shapes, which hold zeros and take no memory."""
    wanted = dict(shapes)

    def leaf_of(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.new_zeros(()).expand(wanted[leaf_name(path)])

    return pytree.tree_map_with_path(leaf_of, _opened(batch))


def join_batches(batches: Sequence[Any]) -> Any:
    """One batch with the samples of several; what is no tensor comes from the first."""
    joined = zip(*(pytree.tree_leaves(_opened(batch)) for batch in batches), strict=True)
    parts = [torch.cat(found) if isinstance(found[0], Tensor) else found[0] for found in joined]
    return pytree.tree_unflatten(parts, pytree.tree_structure(batches[0]))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def leaf_name(path: Any) -> str:
    """The name of a place in a batch; no other place, and no parameter, has the same."""
    return "batch:" + (".".join(map(_path_word, path)) or "*")


def users_name(name: str) -> str:
    """What the user calls a leaf: `x` of {"x": ...}, and `batch` where that is one tensor."""
    return unquote(name.removeprefix("batch:")).replace("*", "batch")


def _path_word(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            plain = isinstance(value, str) or attribute == "idx"
            return quote(str(value) if plain else repr(value), safe="_-")
    return quote(str(key), safe="_-")
