"""In-place changes: allowed inside a chunk, refused where another chunk would see them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from piper.errors import TraceError
from piper.frontend.capture import Capture, source_of, value_of

_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")}
_IN_PLACE |= {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
_NOT_IN_PLACE = {operator.index, operator.inv, operator.invert, operator.is_, operator.is_not}
_IN_PLACE -= _NOT_IN_PLACE | {operator.__index__, operator.__inv__, operator.__invert__}


def refuse_mutation(
    nodes: Sequence[fx.Node], chunk_of: dict[fx.Node, int], capture: Capture
) -> None:
    """Raise if a change in place touches what is given, or what another chunk made or has read.

    Whoever reads after the last change sees the final content, which is what a chunk hands on.
    """
    changes = [(node, target) for node in nodes if (target := _changed(node)) is not None]
    if not changes:
        return
    position = {node: index for index, node in enumerate(nodes)}
    home: dict[int, int] = {}  # memory -> the chunk that made it
    reached: dict[int, list[fx.Node]] = defaultdict(list)  # memory -> nodes that touch it
    for node in chunk_of:
        for memory in _memory(value_of(node)):
            home.setdefault(memory, chunk_of[node])
        for touched in (node, *node.all_input_nodes):
            for memory in _memory(value_of(touched)):
                reached[memory].append(node)
    given = {m: node for node in capture.origins for m in _memory(value_of(node))}
    for node, target in changes:
        for memory in _memory(value_of(target)):
            if memory in given:
                origin = capture.origins[given[memory]]
                _refuse(node, f"{origin.role} {origin.name} is changed in place")
            if node not in chunk_of:  # code that every reader has for itself
                continue
            early = any(
                chunk_of[other] != home[memory] and position[other] < position[node]
                for other in reached[memory]
            )
            if chunk_of[node] != home[memory] or early:
                _refuse(node, f"{target.name} is changed in place, but other regions read it")


def _changed(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one changes."""
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE if node.op == "call_function" else False
    in_place = in_place or (str(name).endswith("_") and not str(name).endswith("__"))
    if not in_place and node.kwargs.get("inplace") is not True:
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None


def _memory(value: Any) -> list[int]:
    results = value if isinstance(value, tuple | list) else [value]
    return [r.untyped_storage()._cdata for r in results if isinstance(r, Tensor)]


def _refuse(node: fx.Node, what: str) -> None:
    raise TraceError(
        f"{what} ({source_of(node)})",
        legal="write the result to a new tensor: x = x + y instead of x += y",
    )
