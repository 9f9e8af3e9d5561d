"""transfers: a Value that is read on another slice than its own travels by send and recv."""

from __future__ import annotations

import msgspec

from piper.ir.nodes import Comm, Node
from piper.mesh import Group
from piper.passes.draft import Draft, at_slice


def transfer_values(draft: Draft) -> None:
    """Add one send and recv per Value and slice that reads it, and point the readers to the copy."""
    for node in list(draft.nodes.values()):
        foreign = [
            name
            for name in node.inputs
            if draft.values[name].slice != node.slice and draft.values[name].role != "wire"
        ]
        if foreign:
            moved = {name: _transfer(draft, name, node) for name in foreign}
            inputs = tuple(moved.get(name, name) for name in node.inputs)
            draft.nodes[node.name] = msgspec.structs.replace(node, inputs=inputs)


def _transfer(draft: Draft, name: str, reader: Node) -> str:
    value = draft.values[name]
    copy = at_slice(name, reader.slice)
    if copy in draft.values:
        return copy
    assert value.slice is not None and reader.slice is not None
    draft.like(value, copy, reader.slice)
    wire = draft.like(value, f"{name}>{reader.slice}", None, role="wire")
    group = Group((value.slice, reader.slice), ())
    stream = f"{value.slice}>{reader.slice}"
    for comm, at, source, result in (
        ("send", value.slice, name, wire),
        ("recv", reader.slice, wire, copy),
    ):
        draft.node(
            Comm(
                name=f"{comm}>{copy}",
                tags=reader.tags,
                inputs=(source,),
                outputs=(result,),
                slice=at,
                stream=stream,
                origin=reader.origin,
                comm=comm,  # type: ignore[arg-type]
                group=group,
                key=copy,
            )
        )
    return copy
