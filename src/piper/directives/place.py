"""place: which slice of the mesh runs the selected chunks."""

from __future__ import annotations

import msgspec

from piper.directives.owning import check_stream
from piper.errors import Call, MeshError, PlaceError
from piper.ir.directive import Selecting, Site
from piper.ir.graph import Graph
from piper.ir.nodes import Node
from piper.ir.select import select
from piper.mesh import Slice


class _At(Selecting, frozen=True):
    at: Slice


class Place(_At, frozen=True, kw_only=True):
    """Run the selected chunks on the ranks of a slice.

    What they receive from chunks on other slices, and send there, travels on `stream`; where both ends
    name one, on that of the receiver. Each pair of slices has a queue of its own in each direction, so
    that no message waits for one that goes the other way.

    Requires:
        1. `at` is a slice of the mesh that the schedule declared.
        2. No selected chunk is placed on another slice.

    Rewrite:
        s.place(where(PP=0), mesh.at(pp=0))
        # changes 2 nodes

        F[PP=0]  B[PP=0]
            slice none -> pp=0
            origin -1 -> 1

    Example:
        >>> s.place(where(PP=0), mesh.at(pp=0))
        >>> print(s.graph.nodes["F[PP=0,EP=0]"].slice)
        pp=0
    """

    stream: str | None = None

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        self._check_slice(graph, site.call)
        transfer = check_stream(graph, self.stream, call=site.call) if self.stream else ""
        changed: dict[str, Node] = {}
        for name in select(graph, self.selector, call=site.call):
            node = graph.nodes[name]
            if node.slice is not None and node.slice != self.at:
                raise PlaceError(
                    f"{name} would run on two slices",
                    call=site.call,
                    requirement=2,
                    details=[f"already at {node.slice}, now at {self.at}"],
                    legal=f"selectors that do not overlap, or {node.slice} again",
                )
            changed[name] = msgspec.structs.replace(
                node, slice=self.at, transfer=transfer, origin=site.origin
            )
        return graph.replacing(changed)

    def _check_slice(self, graph: Graph, call: Call) -> None:
        if not isinstance(self.at, Slice):
            raise MeshError(
                f"{self.at!r} is not a slice",
                call=call,
                requirement=1,
                legal="a slice: mesh.at(pp=0)",
            )
        sizes = dict(graph.mesh.axes)
        for axis, coordinate in self.at.fixed:
            if axis not in sizes or not 0 <= coordinate < sizes[axis]:
                raise MeshError(
                    f"{self.at} is not a slice of the mesh",
                    call=call,
                    requirement=1,
                    legal=f"mesh {graph.mesh}",
                )
