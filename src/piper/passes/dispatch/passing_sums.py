"""passing_sums: a graph in its order in; which sums are freed once they are reduced, out."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.ir.graph import Graph
from piper.ir.nodes import Accumulate
from piper.ir.values import Value
from piper.mesh import Slice


def passing_sums(graph: Graph) -> Graph:
    """Keep gradients in the place of their sums only where all sums of a slice are there at once.

    If one starts when another is complete already, as where all microbatches pass a stage before the
    next one, whole sums would pile up that could be freed: there each gradient has memory of its own.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, node in enumerate(graph.nodes.values()):
        for name in node.outputs if isinstance(node, Accumulate) else ():
            if graph.values[name].role == "unreduced":
                first.setdefault(name, place)
                last[name] = place
    sums: dict[Slice | None, list[str]] = defaultdict(list)
    for name in first:
        sums[graph.values[name].slice].append(name)
    passing = {
        name
        for names in sums.values()
        if max(first[name] for name in names) > min(last[name] for name in names)
        for name in names
    }
    if not passing:
        return graph
    values = {name: _passing(value, passing) for name, value in graph.values.items()}
    return msgspec.structs.replace(graph, values=values)


def _passing(value: Value, passing: set[str]) -> Value:
    if value.name in passing:
        return msgspec.structs.replace(value, role="sum")
    return msgspec.structs.replace(value, base="") if value.base in passing else value
