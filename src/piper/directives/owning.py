"""Ownership of mesh axes: the part that replicate, shard and shard_tensor have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from piper.errors import AxisError, Call, MeshError, did_you_mean
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk, Node, Owner
from piper.ir.values import GIVEN, Value, made_along


def axes_of(graph: Graph, over: str | tuple[str, ...], *, call: Call) -> tuple[str, ...]:
    """The axes of an `over=` argument, checked against the mesh, in mesh order."""
    named = tuple(over) if isinstance(over, tuple | list) else (over,)
    for axis in named:
        if axis not in graph.mesh.names:
            near = did_you_mean(axis, graph.mesh.names) if isinstance(axis, str) else ""
            raise MeshError(
                f"the mesh has no axis {axis!r}{near}",
                call=call,
                requirement=1,
                legal=f"mesh {graph.mesh}",
            )
    return tuple(axis for axis in graph.mesh.names if axis in named)


def check_stream(graph: Graph, stream: str, *, call: Call) -> str:
    known = [declared.name for declared in graph.streams]
    if stream not in known:
        raise MeshError(
            f"no stream is called {stream!r}{did_you_mean(stream, known)}",
            call=call,
            legal=f"streams {', '.join(known) or '(none)'}: declare it with s.stream({stream!r})",
        )
    return stream


def own(
    graph: Graph,
    names: Iterable[str],
    axes: tuple[str, ...],
    like: Owner,
    *,
    call: Call,
    counts: Callable[[Chunk], str] | None = None,
) -> Graph:
    """Make a directive the owner of `axes` on these chunks, and lay their Values out accordingly.

    `like` is the owner of each axis but for its name; `counts` names those of a chunk's rows, where
    experts are shared.
    """
    nodes: dict[str, Node] = {}
    values: dict[str, Value] = {}
    for name in names:
        node = graph.nodes[name]
        assert isinstance(node, Chunk)
        for owner in node.owners:
            if owner.axis in axes:
                raise AxisError(
                    f"axis {owner.axis} of {name} would have two owners",
                    call=call,
                    requirement=2,
                    details=[f"it is already owned by {owner.how}"],
                    legal="selectors that do not overlap: where(..., EP=None) leaves experts out",
                )
        added = tuple(msgspec.structs.replace(like, axis=axis) for axis in axes)
        nodes[name] = msgspec.structs.replace(node, owners=(*node.owners, *added))
        for value in _laid_out(graph, node):
            known = values.get(value, graph.values[value])
            at = counts(node) if counts else ""
            made = {axis: made_along(known, axis, like.shares, at) for axis in axes}
            layout = dict(known.layout) | made
            if known.role == "param" and any(layout[a] != b for a, b in known.layout):
                raise AxisError(
                    f"{value} would be both whole and split along {', '.join(axes)}",
                    call=call,
                    requirement=2,
                    details=[f"{name} shares it with a chunk that has another owner of the axis"],
                    legal="parameters that only one kind of region reads",
                )
            ordered = tuple((axis, layout[axis]) for axis in graph.mesh.names if axis in layout)
            values[value] = msgspec.structs.replace(known, layout=ordered)
    return graph.replacing(nodes, values)


def _laid_out(graph: Graph, node: Chunk) -> list[str]:
    """The Values whose layout a chunk decides: what it makes, what only it is given, and what only it
    reads in that layout."""
    values = graph.values
    found = [v for v in node.outputs if values[v].role != "saved"]
    for name in node.inputs:
        if values[name].role in GIVEN:
            found.append(name)
        while values[name].source:  # changed along one axis, and then along another
            found.append(name)
            name = values[name].source
    return found
