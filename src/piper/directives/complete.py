"""The end of a strategy: fill in what was left open, and check that nothing is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from piper.errors import AxisError, Call, PlaceError
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Node
from piper.ir.order.ordering import resolve_orders
from piper.mesh import Slice


def complete(graph: Graph, calls: Sequence[Call]) -> Graph:
    """Every chunk on one slice, every axis of it owned once, all slices alike, all orders possible."""
    mesh_call = next((call for call in calls if call.name == "mesh"), Call("strategy"))
    graph = _place_the_rest(graph, mesh_call)
    _check_slices(graph, calls, mesh_call)
    for node in graph.chunks:
        _check_axes(graph, node, calls, mesh_call)
        _check_backward(graph, node, _placing(node, calls) or mesh_call)
    resolve_orders(graph, calls)  # raises if one is impossible; the edges come with the Comms
    return graph


def _place_the_rest(graph: Graph, call: Call) -> Graph:
    """Without any place, all chunks run on the whole mesh."""
    open_nodes = [name for name, node in graph.nodes.items() if node.slice is None]
    if not open_nodes:
        return graph
    if len(open_nodes) < len(graph.nodes):
        raise PlaceError(
            f"{open_nodes[0]} is on no slice",
            call=call,
            details=[f"and {len(open_nodes) - 1} more"] if len(open_nodes) > 1 else [],
            legal="place every chunk, or none (then all run on the whole mesh)",
        )
    changed: dict[str, Node] = {
        name: msgspec.structs.replace(node, slice=Slice()) for name, node in graph.nodes.items()
    }
    return graph.replacing(changed)


def _placing(node: Node, calls: Sequence[Call]) -> Call | None:
    """The directive that placed a node."""
    return calls[node.origin] if node.origin >= 0 else None


def _check_slices(graph: Graph, calls: Sequence[Call], call: Call) -> None:
    placed: dict[Slice, Node] = {}
    for node in graph.nodes.values():
        placed.setdefault(node.slice or Slice(), node)
    slices = list(placed)
    first = slices[0]
    for other in slices:
        if graph.mesh.free(other) != graph.mesh.free(first):
            raise PlaceError(
                f"slices of unequal shape: {first} and {other}",
                call=_placing(placed[other], calls) or call,
                legal="slices that fix the same axes of the mesh",
            )
    wanted = graph.mesh.size_of(tuple(axis for axis in graph.mesh.names if axis in first.axes))
    if len(slices) < wanted:
        raise PlaceError(
            f"the mesh has {wanted} slices along {','.join(sorted(first.axes))}, but only "
            f"{len(slices)} {'has' if len(slices) == 1 else 'have'} work: "
            f"{'; '.join(map(str, sorted(slices)))}",
            call=call,
            legal="a smaller mesh, or chunks on every slice",
        )


def _check_axes(graph: Graph, node: Chunk, calls: Sequence[Call], call: Call) -> None:
    assert node.slice is not None
    owned = {owner.axis: owner for owner in node.owners}
    for axis in node.slice.axes:
        if axis in owned:
            raise AxisError(
                f"axis {axis} of {node.name} is owned by {owned[axis].how}, but its place fixes it",
                call=calls[owned[axis].origin],
                details=[f"{node.name} is at {node.slice}"],
                legal=f"over {', '.join(graph.mesh.free(node.slice)) or '(nothing)'}",
            )
    for axis in graph.mesh.free(node.slice):
        if axis not in owned and dict(graph.mesh.axes)[axis] > 1:
            raise AxisError(
                f"nobody owns axis {axis} of {node.name}",
                call=call,
                details=[f"{node.name} runs on all ranks of {node.slice}"],
                legal=f'place(where(...), mesh.at({axis}=...)), replicate(where(...), over="{axis}") '
                f'or shard(where(...), over="{axis}")',
            )


def _check_backward(graph: Graph, node: Chunk, call: Call) -> None:
    if node.phase == "F":
        return
    forward = graph.nodes[node.forward]
    assert isinstance(forward, Chunk)
    if forward.slice != node.slice:
        _differ(forward, node, f"{forward.slice} and {node.slice}", call)
    if {(o.axis, o.how) for o in forward.owners} != {(o.axis, o.how) for o in node.owners}:
        _differ(forward, node, "different owners of their axes", call)


def _differ(forward: Chunk, backward: Chunk, how: str, call: Call) -> NoReturn:
    raise PlaceError(
        f"{forward.name} and {backward.name} have {how}",
        call=call,
        legal="selectors without a phase: a backward runs where its forward ran",
    )
