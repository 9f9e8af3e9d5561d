"""computed_again: pieces of code of which nothing is saved in; the nodes that run them again out.

Communication lies between the pieces of a chunk that is cut over ranks, and around sharded experts, so
that no backward body can run all of a layer. Its pieces run again as nodes of their own (R), and so does
the communication between them. A piece whose results no other needs for that runs inside of its
backward, as everywhere. Rows travel again by the counts of the first time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from piper.ir.graph import Graph, OrderEdge
from piper.ir.nodes import TRACED, Chunk
from piper.ir.values import Value
from piper.passes.physical.bound import BoundForward, traced_layouts
from piper.passes.physical.draft import Draft
from piper.passes.physical.relayouts import Relayouts, made_again
from piper.plan.body_spec import BodySpec, ChunkBodies

_ONCE = ("loss", "count")  # roles of what counts where it is made first


@dataclass
class _Whole:
    """All pieces of a chunk, or of a layer of several, in one microbatch, in their order."""

    pieces: list[Chunk] = field(default_factory=list)
    backwards: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    needed: set[str] = field(default_factory=set)  # what pieces read when they run again
    copies: dict[str, str] = field(default_factory=dict)  # Value -> the same, made again
    again: list[Chunk] = field(default_factory=list)  # what runs again
    first: list[str] = field(default_factory=list)  # of that, what needs no other
    done: bool = False


class ComputedAgain:
    """The chunks of a graph that are pieces of something and keep nothing; `bodies` are those of a piece
    that saves what its backward needs, and `bound` all forwards."""

    def __init__(
        self,
        draft: Draft,
        relayouts: Relayouts,
        bodies: Callable[[Chunk], ChunkBodies],
        bound: dict[str, BoundForward],
    ) -> None:
        self.draft = draft
        self.logical: Graph = draft.logical
        self.relayouts = relayouts
        self.bodies = bodies
        self.bound = bound
        found: dict[tuple[int, int], _Whole] = defaultdict(_Whole)
        of: dict[str, _Whole] = {}
        for node in self.logical.chunks:
            if node.again == "nothing" and node.piece_of >= 0:
                key = node.piece_of, self.logical.microbatch(node)
                whole = of[node.name] = found[key]
                if node.phase == "F":
                    whole.pieces.append(node)
                else:
                    whole.backwards[node.forward].append(node)
        self.of = {name: whole for name, whole in of.items() if len(whole.pieces) > 1}

    def before(self, backward: Chunk) -> None:
        """Have all run again that the backwards of a chunk need, before the first of them."""
        whole = self.of.get(backward.name)
        if whole is None or whole.done:
            return
        whole.done = True
        saving = self._needed(whole)
        serves = _first_phase(whole, self.bound)
        for piece in whole.pieces:
            if piece.name in saving:
                self._run(whole, piece, saving[piece.name], serves)
            else:
                self._inside(whole, piece)

    def _needed(self, whole: _Whole) -> dict[str, ChunkBodies]:
        """The pieces whose results others need, with the bodies that save what backwards need."""
        sources, needed = self.logical.sources, whole.needed
        saving: dict[str, ChunkBodies] = {}
        for piece in reversed(whole.pieces):
            if needed.isdisjoint(piece.outputs):
                bodies, phases = self.bound[piece.name].bodies, []
            else:
                bodies, phases = self.bodies(piece), ["F"]
                saving[piece.name] = bodies
            phases += [backward.phase for backward in whole.backwards[piece.name]]
            for index in _inputs_of(bodies, phases):
                name = piece.inputs[index]
                needed.add(sources.get(name, name))
        return saving

    def _run(self, whole: _Whole, piece: Chunk, bodies: ChunkBodies, serves: str) -> None:
        """A node that runs a piece again, of which its backward then takes all that it needs."""
        forward = self.bound[piece.name]
        name = f"R{piece.name.removeprefix('F')}"
        body = bodies.by_phase["F"]
        node = msgspec.structs.replace(
            piece, name=name, phase="R", forward=piece.name, serves=serves, body=body.hash
        )
        read = self._read(whole, piece, range(len(piece.inputs)), node)
        outputs = [self._copy(output, piece) for output in forward.outputs]
        saved = [
            self.draft.value(Value(f"$saved.{i}.{name}", "saved", spec, slice=piece.slice))
            for i, spec in enumerate(bodies.saved)
        ]
        given = [
            self.relayouts.again(node, logical, physical)
            for logical, physical in zip(piece.inputs, read, strict=True)
        ]
        table = {"input": given, "output": outputs, "saved": saved}
        node = msgspec.structs.replace(
            node,
            inputs=tuple(table[ref.kind][ref.index] for ref in body.inputs),
            outputs=tuple(table[ref.kind][ref.index] for ref in body.outputs),
            sees=traced_layouts(self.logical, piece, body.inputs),
            makes=traced_layouts(self.logical, piece, body.outputs),
        )
        self.draft.node(node)
        self._give_back(whole, forward, outputs, node)
        whole.again.append(node)
        if read == forward.inputs:
            whole.first.append(name)
        self.bound[piece.name] = replace(
            forward,
            inputs=read,
            outputs=outputs,
            saved=saved,
            bodies=bodies,
            kept=[f"$kept.{index}.{piece.name}" for index in range(len(bodies.kept))],
        )

    def _inside(self, whole: _Whole, piece: Chunk) -> None:
        """A piece that its backward runs: that reads what was made again."""
        forward = self.bound[piece.name]
        backwards = whole.backwards[piece.name]
        for index in _inputs_of(forward.bodies, [backward.phase for backward in backwards]):
            (forward.inputs[index],) = self._read(whole, piece, (index,), backwards[0])

    def _read(
        self, whole: _Whole, piece: Chunk, indexes: range | tuple[int, ...], node: Chunk
    ) -> list[str]:
        """What a piece reads when it runs again; what is gathered need not be there."""
        sources, forward = self.logical.sources, self.bound[piece.name]
        route = forward.route
        found = []
        for index in indexes:
            name, before = piece.inputs[index], forward.inputs[index]
            again = sources.get(name, name) in whole.copies
            if not again or (route and index == route.form.counts):
                found.append(before)
            elif route and index in route.form.rows:
                rows = self._reading(whole, name, node)
                found.append(route.send_again(self.draft, index, rows, node))
            else:
                found.append(self._reading(whole, name, node))
        return found

    def _reading(self, whole: _Whole, name: str, node: Chunk) -> str:
        value = self.logical.values[name]
        if not value.source:
            return whole.copies[name]
        source = self._reading(whole, value.source, node)
        if source not in self.draft.values:
            source = self.relayouts.again(node, value.source, source)
        return self.relayouts.read_again(node, value, source)

    def _copy(self, output: str, piece: Chunk) -> str:
        value = self.draft.values[output]
        role = "activation" if value.role in _ONCE else value.role
        return self.draft.like(value, made_again(output), piece.slice, role=role)

    def _give_back(
        self, whole: _Whole, forward: BoundForward, outputs: list[str], node: Chunk
    ) -> None:
        """Results of experts back to where the rows came from, if others read them again."""
        made = zip(forward.outputs, forward.results, outputs, strict=True)
        for output, result, copy in made:
            if output == result:
                whole.copies[result] = copy
            elif result in whole.needed:
                assert forward.route is not None
                plain = msgspec.structs.replace(self.draft.values[result], name=made_again(result))
                forward.route.give_back(self.draft, copy, plain, chunk=node)
                whole.copies[result] = plain.name

    def hold(self) -> None:
        """Nothing runs again before the chunks that its backwards wait for: memory would be in use
        meanwhile."""
        wholes = {id(whole): whole for whole in self.of.values() if whole.again}
        makers = defaultdict(list)
        for node in self.draft.nodes.values() if wholes else ():
            for name in node.outputs:
                makers[name].append(node.name)
        for whole in wholes.values():
            own = {node.name for nodes in whole.backwards.values() for node in nodes}
            own |= {node.name for node in (*whole.pieces, *whole.again)}
            before = [name for name in self._sources(whole, makers) if name not in own]
            before = before or [piece.name for piece in whole.pieces]
            for name in before:
                self.draft.edges += [OrderEdge(name, first, TRACED) for first in whole.first]

    def _sources(self, whole: _Whole, makers: dict[str, list[str]]) -> Iterator[str]:
        """Chunks on the same slice from which gradients reach a chunk, through no other."""
        tangents = [self.bound[piece.name].tangents.values() for piece in whole.pieces]
        stack = [name for each in tangents for name in each]
        seen = set(stack)
        at = whole.pieces[0].slice
        while stack:
            for maker in makers.get(stack.pop(), ()):
                node = self.draft.nodes[maker]
                if node.slice != at:
                    continue
                if isinstance(node, Chunk):
                    yield maker
                    continue
                stack += [name for name in node.inputs if name not in seen]
                seen.update(node.inputs)


def _inputs_of(bodies: ChunkBodies, phases: Sequence[str]) -> list[int]:
    """The inputs of a chunk that its bodies for some phases read."""
    read: list[BodySpec] = [bodies.by_phase[p] for p in phases if p in bodies.by_phase]
    return sorted({ref.index for body in read for ref in body.inputs if ref.kind == "input"})


def _first_phase(whole: _Whole, bound: dict[str, BoundForward]) -> Literal["", "B", "BI", "BW"]:
    """The phase of the backwards for which the pieces run again; a first stage may have no BI."""
    phases = {
        backward.serves or backward.phase
        for name, backwards in whole.backwards.items()
        for backward in backwards
        if backward.phase in bound[name].bodies.by_phase
    }
    for phase in ("BI", "B", "BW"):
        if phase in phases:
            return phase
    return ""
