"""relayout: how a Value is made and how it is read in; the communication between the two out.

Nothing else makes a Comm. Along axes of the mesh the table of `ir/layouts.py` says which; between slices
it is a send and a recv.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import PlanError
from piper.ir.layouts import Layout, Layouts, Routed, change_between, shifts_back
from piper.ir.nodes import Comm, CommKind, Tags
from piper.ir.values import Value, made_for
from piper.mesh import Group, Mesh, Slice


@dataclass(frozen=True)
class Way:
    """Where and for whom a communication runs: its node's name, tags, slice, stream and directive.

    A collective that spans several slices has one node on each of `slices`, with one `key`.
    """

    name: str
    at: Slice
    stream: str
    origin: int
    tags: Tags = ()
    key: str = ""
    slices: tuple[Slice, ...] = ()


def laid(layouts: Layouts, axes: tuple[str, ...], layout: Layout) -> Layouts:
    """The same layouts with another one along some axes."""
    return tuple((axis, layout if axis in axes else old) for axis, old in layouts)


def collective(mesh: Mesh, made: Value, read: Value, way: Way, *, splits: str = "") -> Comm | None:
    """The Comm that makes `read` of `made`, or None if both lie alike.

    `splits` names the Value with the rows that go to and come from each rank. Where terms lie on
    several slices too, `way.slices`, they are summed over all of them.
    """
    change, axes = change_between(made_for(made, read), read.layout, mesh)
    if not change and len(way.slices) > 1:
        change = "all_reduce"
    if not change:
        return None
    if change == "own_part":
        raise PlanError(
            f"{way.name} takes its part of {made.name}: that is code, not communication"
        )
    return Comm(
        name=way.name,
        tags=way.tags,
        inputs=(made.name, splits) if splits else (made.name,),
        outputs=(read.name,),
        slice=way.at,
        stream=way.stream,
        origin=way.origin,
        comm=change,
        group=Group(way.slices or (way.at,), axes),
        key=way.key or way.name,
        reverse=_goes_back(made, read, axes),
    )


def _goes_back(made: Value, read: Value, axes: tuple[str, ...]) -> bool:
    """Whether rows, or what was shifted, return to where they came from."""
    routed = any(isinstance(layout, Routed) for axis, layout in made.layout if axis in axes)
    return routed or shifts_back(made.layout, read.layout)


def message(
    made: Value, wire: Value, copy: Value, *, tags: Tags, stream: str, origin: int
) -> tuple[Comm, Comm]:
    """The send and the recv of a Value that is read on another slice than its own."""
    assert made.slice is not None and copy.slice is not None
    group = Group((made.slice, copy.slice), ())

    def end(kind: CommKind, at: Slice, source: Value, result: Value) -> Comm:
        return Comm(
            name=f"{kind}>{copy.name}",
            tags=tags,
            inputs=(source.name,),
            outputs=(result.name,),
            slice=at,
            stream=stream,
            origin=origin,
            comm=kind,
            group=group,
            key=copy.name,
        )

    return end("send", made.slice, made, wire), end("recv", copy.slice, wire, copy)
