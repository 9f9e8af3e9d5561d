"""Graphs from files: a graph in; refused unless its mesh, slices, types and layouts are possible ones.

Nothing here takes time or memory that depends on a number in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import PlanError
from piper.ir.graph import Graph
from piper.ir.layouts import Split
from piper.ir.nodes import Chunk, Node
from piper.ir.values import Value
from piper.mesh import Mesh, Slice, mesh_problem

MAX_PIECES = 1 << 20  # microbatches


def check_frame(graph: Graph) -> None:
    """Raise PlanError at the first number that no graph can have, or name of what does not exist."""
    for why in _problems(graph):
        raise PlanError(f"malformed graph: {why}")


def _problems(graph: Graph) -> Iterator[str]:
    mesh = graph.mesh
    problem = mesh_problem(mesh)
    if problem:
        yield problem
        return
    tags = [split.tag for split in graph.splits]
    sizes = [split.num for split in graph.splits]
    if len(set(tags)) < len(tags) or any(not 1 <= num <= MAX_PIECES for num in sizes):
        yield f"the batch is split into {sizes} along {', '.join(tags)}"
    elif not 1 <= graph.num_microbatches <= MAX_PIECES:
        yield f"there are {graph.num_microbatches} microbatches"
    if len({stream.name for stream in graph.streams}) < len(graph.streams):
        yield "two streams have one name"
    for what, at in _slices(graph):
        if not at.inside(mesh):
            yield f"{what} is at {at}, outside of the mesh {mesh}"
    names = {name.partition("[")[0] for name in graph.values}
    for name in (graph.loss, graph.count):
        if name and name not in names:
            yield f"no Value is called {name}"
    for value in graph.values.values():
        yield from (f"{value.name} {why}" for why in _value(value, mesh))
    for node in graph.nodes.values():
        yield from (f"{node.name} {why}" for why in _node(node, graph))


def _slices(graph: Graph) -> Iterator[tuple[str, Slice]]:
    for value in graph.values.values():
        if value.slice is not None:
            yield value.name, value.slice
    for node in graph.nodes.values():
        if node.slice is not None:
            yield node.name, node.slice
    for order in graph.orders:
        if order.only is not None:
            yield "an order", order.only


def _value(value: Value, mesh: Mesh) -> Iterator[str]:
    if not value.type.possible:
        yield f"is no tensor: {value.type.dtype}{list(value.type.shape)}"
    axes = [axis for axis, _ in value.layout]
    if len(set(axes)) < len(axes) or not set(axes) <= set(mesh.names):
        yield f"lies along {', '.join(axes)}, in the mesh {mesh}"
    for _, layout in value.layout:
        dim = layout.dim if isinstance(layout, Split) else None
        if dim is not None and not 0 <= dim < len(value.type.shape):
            yield f"of {value.type} is cut along dim {dim}"


def _node(node: Node, graph: Graph) -> Iterator[str]:
    axes = [owner.axis for owner in node.owners] if isinstance(node, Chunk) else []
    if len(set(axes)) < len(axes) or not set(axes) <= set(graph.mesh.names):
        yield f"has owners of {', '.join(axes)}, in the mesh {graph.mesh}"
    if isinstance(node, Chunk) and node.phase == "F":
        for name in node.inputs:
            for axis, _ in graph.values[name].layout if name in graph.values else ():
                if axis not in axes:
                    yield f"reads {name} along {axis}, which nothing owns"
