"""place: which slice of the mesh runs the selected chunks."""

from __future__ import annotations

import msgspec

from piper.directives.owning import check_stream
from piper.errors import Call, MeshError, PlaceError
from piper.ir.graph import Graph
from piper.ir.nodes import Node
from piper.ir.select import Selector, select
from piper.mesh import Slice


def place(
    graph: Graph,
    selector: Selector,
    at: Slice,
    *,
    stream: str | None = None,
    origin: int,
    call: Call,
) -> Graph:
    """Run the selected chunks on the ranks of a slice.

    What they receive from chunks on other slices, and send there, travels on `stream`; where both ends
    name one, on that of the receiver. Each pair of slices has a queue of its own in each direction, so
    that no message waits for one that goes the other way.

    Requires:
        1. `at` is a slice of the mesh that the schedule declared.
        2. No selected chunk is placed on another slice.

    Rewrite:
        F[PP=0] -> F[PP=0] at pp=0

    Example:
        >>> s.place(where(PP=0), mesh.at(pp=0))
        >>> print(s.graph.nodes["F[PP=0,EP=0]"].slice)
        pp=0
    """
    if not isinstance(at, Slice):
        raise MeshError(
            f"{at!r} is not a slice", call=call, requirement=1, legal="a slice: mesh.at(pp=0)"
        )
    sizes = dict(graph.mesh.axes)
    for axis, coordinate in at.fixed:
        if axis not in sizes or not 0 <= coordinate < sizes[axis]:
            raise MeshError(
                f"{at} is not a slice of the mesh",
                call=call,
                requirement=1,
                legal=f"mesh {graph.mesh}",
            )
    transfer = check_stream(graph, stream, call=call) if stream else ""
    changed: dict[str, Node] = {}
    for name in select(graph, selector, call=call):
        node = graph.nodes[name]
        if node.slice is not None and node.slice != at:
            raise PlaceError(
                f"{name} would run on two slices",
                call=call,
                requirement=2,
                details=[f"already at {node.slice}, now at {at}"],
                legal=f"selectors that do not overlap, or {node.slice} again",
            )
        changed[name] = msgspec.structs.replace(node, slice=at, transfer=transfer, origin=origin)
    return graph.replacing(changed)
