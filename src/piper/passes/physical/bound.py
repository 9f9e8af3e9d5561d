"""Bound: a forward chunk with its code, as its backward finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.ir.graph import Graph
from piper.ir.layouts import Layouts, as_routed, dual
from piper.ir.nodes import Chunk, Node
from piper.ir.routing import counts_of
from piper.ir.values import made_along
from piper.passes.physical.route import Route
from piper.plan.body_spec import ChunkBodies, Ref


@dataclass
class BoundForward:
    """What a backward needs to know of its forward."""

    inputs: list[str]
    outputs: list[str]  # as the body wrote them
    results: list[str]  # as other chunks see them
    saved: list[str]
    bodies: ChunkBodies
    route: Route | None
    kept: list[str]  # what BI gives to BW
    gradients: dict[str, str] = field(default_factory=dict)  # of what -> that contribution's Value
    receiver: Chunk | None = None  # the B or BI at which gradients of the outputs arrive
    tangents: dict[int, str] = field(default_factory=dict)


def traced_layouts(
    logical: Graph, forward: Node, refs: Sequence[Ref], gradients: Mapping[str, str] | None = None
) -> tuple[Layouts, ...]:
    """How the tensors of a body lie, along axes that share tensors, for which it was traced."""
    found = [_layouts(logical, forward, ref, gradients or {}) for ref in refs]
    return tuple(found) if any(found) else ()


def _layouts(logical: Graph, forward: Node, ref: Ref, gradients: Mapping[str, str]) -> Layouts:
    if ref.kind == "input":
        return _inside(logical, forward, forward.inputs[ref.index])
    if ref.kind == "output":
        return _inside(logical, forward, forward.outputs[ref.index])
    if ref.kind == "tangent":
        made = _inside(logical, forward, forward.outputs[ref.index])
        return tuple((axis, dual(way)) for axis, way in made)
    if ref.kind == "grad":
        return _inside(logical, forward, gradients[forward.inputs[ref.index]])
    return ()  # what one phase keeps for another


def _inside(logical: Graph, node: Node, name: str) -> Layouts:
    """How the code of a node has a Value: rows of sharded experts are with their experts."""
    assert isinstance(node, Chunk)
    value = logical.values[name]
    sharded = [owner.axis for owner in node.owners if owner.shares == "experts"]
    if not any(axis in sharded for axis, _ in value.cut):
        return value.cut
    counts = counts_of(logical, node)
    return as_routed(value.cut, [(a, made_along(value, a, "experts", counts)) for a in sharded])
