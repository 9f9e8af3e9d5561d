"""Bound: a forward chunk with its code, as its backward finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.ir.graph import Graph
from piper.ir.layouts import Layouts, dual
from piper.ir.nodes import Chunk, Node
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
    values = logical.values
    if ref.kind == "input":
        return values[forward.inputs[ref.index]].cut
    if ref.kind == "output":
        return values[forward.outputs[ref.index]].cut
    if ref.kind == "tangent":
        return tuple((a, dual(way)) for a, way in values[forward.outputs[ref.index]].cut)
    if ref.kind == "grad":
        return values[gradients[forward.inputs[ref.index]]].cut
    return ()  # what one phase keeps for another
