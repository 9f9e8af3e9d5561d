"""passing_sums: a graph in its order in; which sums are freed once they are reduced, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from piper.ir.graph import Graph
from piper.ir.nodes import Node, Settle, Update
from piper.ir.tensor_type import dtype_bytes
from piper.ir.values import Value
from piper.mesh import Slice

_MADE = ("activation", "saved", "grad", "param_grad", "statistic")  # and gone in a step
_COPIED = 3  # masters and two averages, which a late update keeps twice for a while


def passing_sums(graph: Graph) -> Graph:
    """Keep gradients in the place of their sums where ranks then hold less at most.

    In its place a gradient takes nothing beside its sum, but the whole sum stays to the end of the step.
    In memory of its own it is there all the time, and the sum only until it is reduced: less, if the
    microbatches of a stage come together, so that few sums are there at once.
    """
    by_slice: dict[Slice | None, list[Node]] = defaultdict(list)
    for node in graph.nodes.values():
        by_slice[node.slice].append(node)
    passing: set[str] = set()
    for nodes in by_slice.values():
        passing |= _passing_of(nodes, graph.values)
    if not passing:
        return graph
    values = {name: _passing(value, passing) for name, value in graph.values.items()}
    return msgspec.structs.replace(graph, values=values)


def _passing(value: Value, passing: set[str]) -> Value:
    if value.name in passing:
        return msgspec.structs.replace(value, role="sum")
    return msgspec.structs.replace(value, base="") if value.base in passing else value


def _passing_of(nodes: Sequence[Node], values: Mapping[str, Value]) -> set[str]:
    """The sums of a slice, all or none."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    parts = 0
    for place, node in enumerate(nodes):
        for value in (values[name] for name in node.outputs):
            if value.role == "unreduced":
                first.setdefault(value.name, place)
                last[value.name] = place
            elif value.role == "gradient" and value.base:
                parts += value.nbytes
    if not first:
        return set()
    rest = _held(nodes, values)
    whole, passing = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for name, begin in first.items():
        whole[begin] += values[name].nbytes
        passing[begin] += values[name].nbytes
        passing[last[name] + 1] -= values[name].nbytes
    sums, gone = list(accumulate(whole)), list(accumulate(passing))
    in_place = max(a + b for a, b in zip(rest, sums, strict=True))
    apart = max(a + b for a, b in zip(rest, gone, strict=True)) + parts
    return set(first) if apart < in_place else set()


def _held(nodes: Sequence[Node], values: Mapping[str, Value]) -> list[int]:
    """Bytes of what nodes make for each other, as each of them runs; and of what late updates keep."""
    changes = [0] * (len(nodes) + 1)
    last: dict[str, int] = {}
    made: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.outputs:
            if values[name].role in _MADE and not values[name].base:
                made.setdefault(name, place)
        for name in (*node.inputs, *node.outputs):
            last[name] = place
        if isinstance(node, Update) and node.late:
            changes[place] += _kept(node, values)
        elif isinstance(node, Settle):
            changes[place + 1] -= _kept(node, values)
    for name, place in made.items():
        changes[place] += values[name].nbytes
        changes[last[name] + 1] -= values[name].nbytes
    return list(accumulate(changes))


def _kept(node: Update | Settle, values: Mapping[str, Value]) -> int:
    """Bytes that a late update copies, in no narrower dtype than float32."""
    *stepped, _ = node.outputs
    types = [values[name].type for name in stepped]
    return sum(_COPIED * type.size * max(4, dtype_bytes(type.dtype)) for type in types)
