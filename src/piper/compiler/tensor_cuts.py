"""tensor_cuts: a graph and its directives in; how code is cut along axes that share tensors, out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from piper.directives.shard_tensor import LEAF, ShardTensor
from piper.errors import TensorError
from piper.frontend.tensor_cut import TensorCut
from piper.ir.attention_forms import AttentionForm
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.layouts import Split


def tensor_cuts(logical: Graph, history: Sequence[Record]) -> tuple[TensorCut, ...]:
    """A cut per axis of several ranks; none where nothing shares tensors."""
    origins: dict[str, set[int]] = {}
    for node in logical.chunks:
        for owner in node.owners:
            if owner.shares == "tensors":
                origins.setdefault(owner.axis, set()).add(owner.origin)
    sizes = dict(logical.mesh.axes)
    cuts = [
        _cut(logical, axis, sizes[axis], [history[number] for number in sorted(origins[axis])])
        for axis in logical.mesh.names
        if axis in origins and sizes[axis] > 1
    ]
    # Where leaves are cut, all code is: the rest is cut as one of those ranks sees it.
    of_leaves = [cut for cut in cuts if cut.batch]
    others = [cut for cut in cuts if not cut.batch]
    # The ranks that those cut parameters over have their own heads, and share them out further.
    blocks = math.prod(cut.size for cut in others if cut.params)
    shared = (replace(c, attention=replace(c.attention, head_blocks=blocks)) for c in of_leaves)
    return (*shared, *others)


def _cut(logical: Graph, axis: str, size: int, records: list[Record]) -> TensorCut:
    over: set[int] = set()  # chunks whose experts are sharded over this axis
    for node in logical.chunks:
        shares = next((owner.shares for owner in node.owners if owner.axis == axis), "")
        if shares not in ("tensors", "experts"):
            raise TensorError(
                f"{node.name} shares no tensors along {axis}, but other chunks do",
                call=records[0].call,
                requirement=2,
                legal=f'shard_tensor(where(), over="{axis}", ...) for all chunks; params={{}} where '
                "all ranks compute alike",
            )
        if shares == "experts":
            over.add(node.chunk)
    marks: dict[str, int] = {}
    leaves: dict[str, int] = {}
    attention = AttentionForm(_agreed(axis, records, "attention", 6))
    strips = _agreed(axis, records, "strips", 9)
    for record in records:
        directive = record.directive
        assert isinstance(directive, ShardTensor)
        marks |= {f"{LEAF}{leaf}": dim for leaf, dim in (directive.sequence or {}).items()}
        leaves |= {f"{LEAF}{leaf}": dim for leaf, dim in (directive.batch or {}).items()}
    params = {
        name: way
        for name, value in logical.values.items()
        if value.role == "param"
        for along, way in value.cut
        if along == axis and isinstance(way, Split)
    }
    sequence, batch = (tuple(sorted(each.items())) for each in (marks, leaves))
    cut = tuple(sorted(params.items()))
    experts = tuple(sorted(_sharded(logical).items()))
    call = records[0].call
    return TensorCut(
        axis, size, cut, sequence, batch, attention, strips, experts, frozenset(over), call=call
    )


def _sharded(logical: Graph) -> dict[int, int]:
    """The chunks whose experts are sharded, each with the number of ranks."""
    over: dict[int, int] = {}
    for node in logical.chunks:
        axes = tuple(owner.axis for owner in node.owners if owner.shares == "experts")
        if (num := logical.mesh.size_of(axes)) > 1:
            over[node.chunk] = num
    return over


def _agreed(axis: str, records: list[Record], name: str, requirement: int) -> Any:
    """An option on which all directives for an axis agree."""
    asked = {getattr(record.directive, name): record for record in records}
    if len(asked) > 1:
        raise TensorError(
            f"{name}={' and '.join(map(repr, asked))} along {axis}",
            call=records[-1].call,
            requirement=requirement,
            legal=f"one {name}= for all chunks",
        )
    return next(iter(asked))
