"""mesh: the names and sizes of the devices' axes."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from piper.errors import MeshError
from piper.ir.directive import Directive, Site
from piper.ir.graph import Graph
from piper.mesh import Mesh


class DeclareMesh(Directive, frozen=True, tag="mesh"):
    """Name the devices' axes and their sizes: `s.mesh(pp=2, dp=4)`.

    Ranks are numbered row by row: the last axis varies fastest.

    Requires:
        1. The schedule has no mesh yet.
        2. Every size is an integer of at least 1.

    Rewrite:
        mesh = s.mesh(pp=2, dp=2)
        # changes no node

        mesh (one device) -> pp=2 dp=2

    Example:
        >>> mesh = s.mesh(pp=2, dp=4)
        >>> list(mesh.ranks(mesh.at(pp=1)))
        [4, 5, 6, 7]
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **axes: int) -> Self:
        return cls(tuple(axes.items()))

    def code(self) -> str:
        return f"mesh = {super().code()}"

    def arguments(self) -> tuple[list[str], dict[str, Any]]:
        return [], dict(self.axes)

    def result(self) -> Mesh:
        return Mesh(self.axes)

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        if graph.mesh.axes:
            raise MeshError("the mesh is declared twice", call=site.call, requirement=1)
        for axis, size in self.axes:
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {axis} has size {size!r}", call=site.call, requirement=2)
        return msgspec.structs.replace(graph, mesh=Mesh(self.axes))
