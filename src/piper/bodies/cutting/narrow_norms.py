"""Norms without casts: a joint graph in which narrow tensors are cast to float32 for layer norms, and
the results back, in; the norms take and give narrow tensors themselves, out.

CUDA's kernels of both ways compute in float32 whatever they are given, and round their results, as the
casts around them do in passes of their own over memory: four in a forward, and seven in a backward.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)
# Norm -> the places of its arguments that are cast.
_CAST: dict[Any, tuple[int, ...]] = {
    _aten.native_layer_norm.default: (0, 2, 3),
    _aten.native_layer_norm_backward.default: (0, 1, 5, 6),
}
_STATISTICS: dict[Any, tuple[int, ...]] = {
    _aten.native_layer_norm.default: (1, 2)
}  # results that are float32 in any case


def narrow_norms(graph: fx.Graph) -> int:
    """Change all norms whose casts can go; how many there are."""
    norms = [node for node in graph.nodes if node.target in _CAST]
    return sum(_narrowed(graph, node) for node in norms)


def _narrowed(graph: fx.Graph, norm: fx.Node) -> bool:
    places = [place for place in _CAST[norm.target] if norm.args[place] is not None]
    casts = [norm.args[place] for place in places]
    dtypes = {_from(cast) for cast in casts}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) is None:
        return False
    parts = [user for user in norm.users if user.target is operator.getitem]
    wide: Sequence[Any] = _STATISTICS.get(norm.target, ())
    narrowed = [part for part in parts if part.args[1] not in wide]
    if len(parts) < len(norm.users) or not all(_is_cast_to(dtype, part) for part in narrowed):
        return False
    given = list(norm.args)
    for place, cast in zip(places, casts, strict=True):
        given[place] = cast.args[0]  # type: ignore[union-attr]
    norm.args = tuple(given)
    values = list(norm.meta["val"])
    for part in narrowed:
        cast, *others = part.users
        part.meta["val"] = values[part.args[1]] = cast.meta["val"]  # type: ignore[index]
        cast.replace_all_uses_with(part)
        graph.erase_node(cast)
        for other in others:  # each in memory of its own, as it was
            other.target, other.kwargs = _aten.clone.default, {}
    norm.meta["val"] = tuple(values)
    _erase(graph, casts)
    return True


def _from(cast: Any) -> torch.dtype | None:
    """The narrow dtype that a node casts to float32."""
    if not isinstance(cast, fx.Node) or cast.target is not _aten._to_copy.default:
        return None
    made, given = cast.meta["val"], cast.all_input_nodes[0].meta["val"]
    narrow = given.dtype in _NARROW and made.dtype == torch.float32
    return given.dtype if narrow and made.device == given.device else None


def _is_cast_to(dtype: torch.dtype, part: fx.Node) -> bool:
    """Whether a result of a norm is read as this dtype, and by nobody otherwise."""
    return bool(part.users) and all(
        user.target is _aten._to_copy.default
        and user.meta["val"].dtype == dtype
        and user.meta["val"].device == part.meta["val"].device
        and str(user.meta["val"].stride()) == str(part.meta["val"].stride())
        for user in part.users
    )


def _erase(graph: fx.Graph, casts: Sequence[Any]) -> None:
    for cast in dict.fromkeys(casts):
        if not cast.users:
            graph.erase_node(cast)
