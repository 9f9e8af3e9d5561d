"""Pieces of a chunk that is cut over ranks: the pieces and changes in; chunks, and the Values between
them, out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import fx

from piper.bodies.checkpoint_regions import CONTEXTS, region_of
from piper.bodies.tensor.cut_over_ranks import Change, Partitioned, Piece, Ref
from piper.errors import AxisError
from piper.frontend.traced import TracedChunk, TracedValue
from piper.ir.layouts import PARTIAL, REPLICATED, STACKED, Layout, Layouts, Split, local_shape
from piper.ir.tensor_type import TensorType
from piper.plan.slots import COORDINATE

if TYPE_CHECKING:
    from piper.frontend.tensor_cut import Cutting


class PiecesOfChunk:
    """The pieces of one chunk, and the Values between them."""

    def __init__(
        self,
        cutting: Cutting,
        index: int,
        chunk: TracedChunk,
        parts: Partitioned,
        orders: list[int],
    ) -> None:
        self.cutting = cutting
        self.orders = orders  # the program's numbers of the chunk's
        self.traced = cutting.traced
        self.axis, self.size = cutting.how.axis, cutting.how.size
        self.index = index
        self.chunk = chunk
        self.parts = parts
        self.given = {node: chunk.inputs[int(number)] for node, number in parts.inputs.items()}
        self.results: dict[Ref, str] = {}
        # Axes that were cut before, each with what differs along it.
        self.varying: set[tuple[str, fx.Node]] = set()
        for node in next(iter(parts.inputs)).graph.nodes:
            self._follow(node)
        self.known = dict(self.given)  # nodes that are Values of the program before
        for name, ref in zip(chunk.outputs, parts.outputs, strict=True):
            self.results.setdefault(ref, name)
            self.known.setdefault(_node_of(ref), name)

    def _follow(self, node: fx.Node) -> None:
        """Note along which axes a node of the chunk's code differs between ranks."""
        given = self.traced.values[self.given[node]] if node in self.given else None
        read = node.all_input_nodes
        for axis in self.cutting.axes_before:
            differs = given and dict(given.cut)[axis] not in (REPLICATED, PARTIAL)
            if differs or any((axis, arg) in self.varying for arg in read):
                self.varying.add((axis, node))

    def add(self) -> None:
        cutting, values = self.cutting, self.cutting.values
        outputs = zip(self.chunk.outputs, self.parts.outputs, self.parts.out_layouts, strict=True)
        for name, ref, layout in outputs:
            cutting.layouts[name] = cutting.orders.outside(layout, self.orders)
            mark = self.parts.marks.get(_node_of(ref))
            if mark is not None:
                cutting.marks[name] = mark
        for name in self.chunk.inputs:
            value = self.traced.values[name]
            if name not in values and not value.source:
                values[name] = cutting.along(value, cutting.layout(name, cutting.layouts))
        for piece in self.parts.pieces:
            for ref, spec in zip(piece.outputs, piece.code.outputs, strict=True):
                self._made(ref, spec)
        for change in self.parts.changes:
            self._changed(change)
        for piece in self.parts.pieces:
            cutting.chunks.append(self._piece(piece))

    def _piece(self, piece: Piece) -> TracedChunk:
        inputs = tuple(map(self._name, piece.inputs))
        place = self.cutting.place
        if place in inputs and place not in self.cutting.values:
            cut = tuple((axis, REPLICATED) for axis in self.cutting.axes_before)
            self.cutting.values[place] = TracedValue(
                "coordinate", COORDINATE, False, False, self.axis, (*cut, (self.axis, STACKED))
            )
        return replace(
            self.chunk,
            inputs=inputs,
            outputs=tuple(map(self._name, piece.outputs)),
            code=piece.code,
            piece_of=self._whole(),
            checkpoint=self.chunk.checkpoint or _checkpoint(self.chunk.code.graph),
            gradients=self.cutting.gradients(self.chunk, inputs, self._lies),
        )

    def _whole(self) -> int:
        """The number of the chunk that is cut, which the cut over another axis has not given yet."""
        return self.chunk.piece_of if self.chunk.piece_of >= 0 else self.cutting.next + self.index

    def _lies(self, param: str) -> Layout:
        """How the gradient of a parameter lies that one of the pieces reads."""
        layout = self.parts.param_grads[str(self.chunk.inputs.index(param))]
        if layout is None:
            raise AxisError(
                f"{param} is read along {self.axis} by code that is equal on all ranks and by code "
                "that differs",
                call=self.cutting.how.call,
                legal="parameters that only one kind of code reads",
            )
        return layout

    def _name(self, ref: Ref) -> str:
        if ref.kind == "place":
            return self.cutting.place
        if ref.kind == "node" and ref.of in self.given:
            return self.given[ref.of]
        if ref in self.results:
            return self.results[ref]
        assert ref.of is not None
        what = ref.of.name
        return f"%{self.axis}{self.index}.{ref.kind}.{what}"

    def _made(self, ref: Ref, spec: TensorType) -> None:
        """A Value that a piece makes."""
        name, node = self._name(ref), _node_of(ref)
        layout = self.parts.layouts[node]
        if ref.kind == "send":
            assert isinstance(ref.of, Change)
            layout = ref.of.sent
        self._value(name, spec, node, layout)

    def _changed(self, change: Change) -> None:
        """A Value in the layout in which pieces read it."""
        name = self._name(Ref("change", change))
        source = Ref("send", change) if change.sends else Ref("node", change.source)
        if change.previous is not None:
            source = Ref("change", change.previous)
        spec = self._read_spec(change)
        self._value(name, spec, change.source, change.read, source=self._name(source))

    def _value(
        self, name: str, spec: TensorType, node: fx.Node, layout: Layout, *, source: str = ""
    ) -> None:
        known = self.traced.values.get(name)
        before = known.cut if known else self._cut_before(node, len(spec.shape))
        self.cutting.values[name] = TracedValue(
            known.role if known else "activation",
            spec,
            self.parts.flows[node],
            self._is_batched(node) if known is None else known.batched,
            known.of if known else "",
            cut=(*before, (self.axis, self.cutting.orders.outside(layout, self.orders))),
            source=source,
        )

    def _is_batched(self, node: fx.Node) -> bool:
        """As the Value that it is; what is made in between may have rows even if it reads no batch."""
        return node not in self.known or self.traced.values[self.known[node]].batched

    def _cut_before(self, node: fx.Node, num_dims: int) -> Layouts:
        """How what is made of a node lies along axes that were cut before: as the input or output of the
        chunk that it is, whose dims a stack moves; else only whether each rank has its own is known."""
        if node not in self.known:
            return tuple(
                (axis, STACKED if (axis, node) in self.varying else REPLICATED)
                for axis in self.cutting.axes_before
            )
        own = self.traced.values[self.known[node]]
        by = num_dims - len(own.spec.shape)
        return tuple(
            (axis, way.along(way.dim + by))
            if isinstance(way, Split) and way.dim is not None
            else (axis, way)
            for axis, way in own.cut
        )

    def _read_spec(self, change: Change) -> TensorType:
        ref = Ref("change", change)
        for piece in self.parts.pieces:
            for have, given in zip(piece.inputs, piece.code.inputs, strict=True):
                if have == ref:
                    return given.spec
        value = change.source.meta["val"]
        shape = local_shape(tuple(value.shape), change.want, self.size)
        return self.parts.as_seen(TensorType(shape, str(value.dtype).removeprefix("torch.")))


def _checkpoint(graph: fx.Graph) -> Literal["", "nothing", "expensive"]:
    """What is kept of code that the user checkpoints: nothing, or products where a policy chooses."""
    # Masks and tables that read nothing may be copies from elsewhere.
    own = (n for n in graph.nodes if any(arg.op == "placeholder" for arg in n.all_input_nodes))
    first = next(own, None)
    if first is None or region_of(first) is None:
        return ""
    return "expensive" if CONTEXTS in first.meta else "nothing"


def _node_of(ref: Ref) -> fx.Node:
    node = ref.of.source if isinstance(ref.of, Change) else ref.of
    assert node is not None
    return node
