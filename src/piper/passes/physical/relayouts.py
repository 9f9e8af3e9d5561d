"""relayouts: a Value and how its readers need it in; the communication, and that of its gradient, out.

A Value that is read in another layout than it is made in is read under another name, whose `source` is
the one that was made. Partial sums are reduced where they are made, so that a result crosses to other
slices once; what is to be gathered crosses in parts, and is gathered where it is read.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from piper.ir.layouts import Partial, change_between, dual, local
from piper.ir.nodes import Chunk, Owner
from piper.ir.values import Value, made_for, plain_layout
from piper.mesh import Slice
from piper.passes.physical.draft import Draft, at_slice, lane
from piper.passes.physical.relayout import Way, collective
from piper.passes.physical.tangents import sum_tangent


class Relayouts:
    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.logical = draft.logical
        self.read_as: dict[tuple[str, Slice | None], str] = {}  # and where -> the Value that it is
        self.places: dict[str, dict[Slice, Chunk]] = defaultdict(
            dict
        )  # where it is changed, for whom
        # What was, or can be, gathered, as it is then and in parts.
        self.gathered: dict[str, tuple[Value, Value]] = {}
        self.readings: dict[str, list[str]] = defaultdict(list)  # Value -> it in other layouts
        for name, value in self.logical.values.items():
            if value.source:
                self.readings[value.source].append(name)

    def read(self, node: Chunk, value: Value, source: str) -> str:
        """What a chunk reads where it asks for `value`, of which `source` was made."""
        made = self.draft.values[source]
        by = self._maker(value) if _is_partial(made) else node
        at = by.slice
        assert at is not None
        self.places[value.name].setdefault(at, by)
        if (value.name, at) not in self.read_as:
            self.read_as[value.name, at] = self._changed(by, value, made, at)
        return self.read_as[value.name, at]

    def again(self, node: Chunk, name: str, given: str) -> str:
        """What a backward reads where its forward read `name`, which was `given`: what was gathered is
        gathered again, so that it need not be kept."""
        value = self.logical.values[name]
        if given not in self.gathered or not value.source:
            return given
        whole, made = self.gathered[given]
        result = msgspec.structs.replace(whole, name=f"{given}>{node.name}")
        if result.name not in self.draft.values:
            way = made_for(made, result)
            _, axes = change_between(way, result.layout, self.logical.mesh)
            self._communicate(f"again>{result.name}", node, made, result, axes)
        return result.name

    def _maker(self, value: Value) -> Chunk:
        maker = self.logical.nodes[self.logical.producers[value.source][0]]
        assert isinstance(maker, Chunk)
        return maker

    def _changed(self, node: Chunk, value: Value, made: Value, at: Slice) -> str:
        value = between_chunks(value)
        change, axes = change_between(made_for(made, value), value.layout, self.logical.mesh)
        if not change:
            return made.name
        several = any(place != at for place in self.places[value.name])
        result = msgspec.structs.replace(
            value,
            name=at_slice(value.name, at) if several else value.name,
            type=local(value.type, value.layout, self.logical.mesh),
            slice=at,
            source="",
        )
        self._communicate(f"{change}>{result.name}", node, made, result, axes)
        if change == "all_gather":
            self.gathered[result.name] = result, made
        return result.name

    def read_again(self, node: Chunk, value: Value, source: str) -> str:
        """What a chunk that runs again reads where it asks for `value`, whose `source` was made again.
        Nothing is gathered before somebody asks for it by `again`."""
        made, value = self.draft.values[source], between_chunks(value)
        change, axes = change_between(made_for(made, value), value.layout, self.logical.mesh)
        if not change:
            return source
        result = msgspec.structs.replace(
            value,
            name=made_again(value.name),
            type=local(value.type, value.layout, self.logical.mesh),
            slice=node.slice,
            source="",
        )
        if change == "all_gather":
            self.gathered[result.name] = result, made
        elif result.name not in self.draft.values:
            self._communicate(f"{change}>{result.name}", node, made, result, axes)
        return result.name

    def tangents(self, node: Chunk, output: str) -> list[str]:
        """Contributions to the gradient of an output by those who read it in other layouts."""
        found = []
        for name in self.readings.get(output, ()):
            for at, by in self.places[name].items():
                total = self._total(node, name, at)
                if total:
                    found.append(self._back(by, self.logical.values[name], total, at))
        return found

    def _total(self, node: Chunk, name: str, at: Slice) -> str:
        """The gradient of a Value as it was read at a slice."""
        values = self.logical.values
        mine = [n for n in node.inputs if values[n].role == "grad" and values[n].of == name]
        if len(self.places[name]) > 1:
            mine = [n for n in mine if self._made_at(n) == at]
        mine += self.tangents(node, name)
        if not mine:
            return ""
        return sum_tangent(self.draft, msgspec.structs.replace(node, slice=at), name, mine)

    def _made_at(self, gradient: str) -> Slice | None:
        producer = self.logical.producers[gradient][0]
        return self.logical.nodes[producer].slice

    def _back(self, node: Chunk, value: Value, total: str, at: Slice) -> str:
        """The gradient of what a Value was read from, in the layout that its maker takes."""
        source = between_chunks(self.logical.values[value.source])
        gradient = self.draft.values[total]
        result = msgspec.structs.replace(
            gradient,
            name=f"$d.{value.name}>{at}",
            role="grad",
            type=local(source.type, source.layout, self.logical.mesh),
            layout=tuple((axis, dual(way)) for axis, way in source.layout),
            cut=tuple((axis, dual(way)) for axis, way in source.cut),
            batch=dual(source.batch),
            of=value.source,
            slice=at,
        )
        way = made_for(gradient, result)
        change, axes = change_between(way, result.layout, self.logical.mesh)
        if not change:
            return total
        self._communicate(f"{change}>{result.name}", node, gradient, result, axes)
        return result.name

    def _communicate(
        self, name: str, node: Chunk, made: Value, result: Value, axes: tuple[str, ...]
    ) -> None:
        owner = _owner(node, axes)
        assert result.slice is not None
        way = Way(name, result.slice, self._stream(node, owner), owner.origin, node.tags)
        comm = collective(self.logical.mesh, made, result, way)
        assert comm is not None
        self.draft.value(result)
        self.draft.node(comm)

    def _stream(self, node: Chunk, owner: Owner) -> str:
        """Microbatches take turns on the lanes, so that one's exchanges go on beside another's."""
        turn = self.logical.microbatch(node) % self.draft.lanes
        return lane(self.logical, owner.stream, turn)


def made_again(name: str) -> str:
    """The name of a Value that code has made a second time."""
    return f"{name}~again"


def between_chunks(value: Value) -> Value:
    """A Value as it lies between chunks: rows for sharded experts are where their tokens are."""
    return msgspec.structs.replace(value, layout=plain_layout(value))


def _is_partial(made: Value) -> bool:
    return any(isinstance(layout, Partial) for _, layout in made.cut)


def _owner(node: Chunk, axes: tuple[str, ...]) -> Owner:
    return next(owner for owner in node.owners if owner.axis in axes)
