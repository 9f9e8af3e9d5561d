"""transfers: a Value that is read on another slice than its own travels by send and recv."""

from __future__ import annotations

import msgspec

from piper.ir.nodes import Chunk, Node
from piper.mesh import Slice
from piper.passes.physical.draft import Draft, at_slice
from piper.passes.physical.relayout import message


def transfer_values(draft: Draft) -> None:
    """Add one send and recv per Value and slice that reads it, and point the readers to the copy.

    They come from the `place` of the chunk that is served, and take its stream if it names one.
    """
    ends = _Ends(draft)
    for node in list(draft.nodes.values()):
        foreign = [
            name
            for name in node.inputs
            if draft.values[name].slice != node.slice and draft.values[name].role != "wire"
        ]
        if foreign:
            moved = {name: _transfer(draft, name, node, ends) for name in foreign}
            inputs = tuple(moved.get(name, name) for name in node.inputs)
            draft.nodes[node.name] = msgspec.structs.replace(node, inputs=inputs)


class _Ends:
    """The chunks that nodes work for: themselves, or the one with their tags."""

    def __init__(self, draft: Draft) -> None:
        # No selector tells chunks of equal tags and phase apart, so that these had one `place`.
        self.chunks = {chunk.tags: chunk for chunk in draft.logical.chunks}
        self.makers = {name: node for node in draft.nodes.values() for name in node.outputs}

    def reader(self, node: Node) -> Chunk | None:
        return node if isinstance(node, Chunk) else self.chunks.get(node.tags)

    def maker(self, value: str) -> Chunk | None:
        return self.reader(self.makers[value]) if value in self.makers else None


def message_stream(named: str, source: Slice, target: Slice) -> str:
    """The queue of messages between two slices. Each direction has its own, so that none waits behind
    the other; of a stream that the user named it is a part, with its priority."""
    way = f"{source}>{target}"
    return f"{named}:{way}" if named else way


def _transfer(draft: Draft, name: str, reader: Node, ends: _Ends) -> str:
    value = draft.values[name]
    copy = at_slice(name, reader.slice)
    if copy in draft.values:
        return copy
    assert value.slice is not None and reader.slice is not None
    draft.like(value, copy, reader.slice)
    wire = draft.like(value, f"{name}>{reader.slice}", None, role="wire")
    served, maker = ends.reader(reader), ends.maker(name)
    named = (served.transfer if served else "") or (maker.transfer if maker else "")
    stream = message_stream(named, value.slice, reader.slice)
    ends_of_message = message(
        value,
        draft.values[wire],
        draft.values[copy],
        tags=reader.tags,
        stream=stream,
        origin=served.origin if served else reader.origin,
    )
    for end in ends_of_message:
        draft.node(end)
    return copy
