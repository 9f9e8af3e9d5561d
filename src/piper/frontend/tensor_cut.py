"""Tensor cuts: a traced program in; the same as one rank of an axis that shares tensors runs it out.

Chunks come in pieces, cut wherever a layout changes. A Value that is read in another layout than it is
made in has a Value of its own for that, whose `source` it is: passes turn the difference into
communication. One axis at a time: what comes out for one is cut for the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx

from piper.bodies.captured_nodes import source_of
from piper.bodies.checkpoint_regions import CONTEXTS, region_of
from piper.bodies.tensor.changes import Ends, SortedApartError
from piper.bodies.tensor.cut_over_ranks import Change, Partitioned, Piece, Ref, partition
from piper.bodies.tensor.rows_by_data import at_any_rows
from piper.bodies.tensor.rules.rule_table import operator_name
from piper.errors import AxisError, Call, TensorError, TraceError
from piper.frontend.ends_of_chunks import EndsOfChunks
from piper.frontend.own_orders import OwnOrders, rows_of_experts, with_own_rows
from piper.frontend.traced import Traced, TracedChunk, TracedValue
from piper.ir.attention_forms import GATHER, AttentionForm
from piper.ir.layouts import PARTIAL, REPLICATED, STACKED, Layout, Layouts, Split, local_shape
from piper.ir.nodes import label
from piper.ir.tensor_type import TensorType
from piper.ir.values import RESULTS
from piper.plan.slots import COORDINATE

Dims = tuple[tuple[str, int], ...]  # leaves of the batch, each with a dim


@dataclass(frozen=True)
class TensorCut:
    """What the ranks of an axis share: `params` lie so, `sequence` names dims along which activations
    between matrices may be split, `batch` leaves of which each rank takes its part, and `attention`
    what moves where sequences are split. Chunks of `experts` are sharded over so many ranks."""

    axis: str
    size: int
    params: tuple[tuple[str, Split], ...] = ()
    sequence: Dims = ()
    batch: Dims = ()
    attention: AttentionForm = GATHER
    experts: tuple[tuple[int, int], ...] = ()
    call: Call | None = field(
        default=None, compare=False
    )  # of the first directive that asks for it


@contextlib.contextmanager
def refusing(chunk: TracedChunk, call: Call | None) -> Iterator[None]:
    """Errors about a chunk's code name the chunk, and the directive that has it cut."""
    try:
        yield
    except TraceError as error:
        details = [*error.details, f"in {_region(chunk)}"]
        raise TraceError(error.message, call=call, details=details, legal=error.legal) from error


def _region(chunk: TracedChunk) -> str:
    return label("F", chunk.tags, part=chunk.part, parts=chunk.parts)


@dataclass
class TensorCuts:
    """Cuts programs; equal chunks are cut once."""

    known: dict[tuple[Any, ...], Partitioned] = field(default_factory=dict)

    def cut(self, traced: Traced, how: TensorCut) -> Traced:
        """Each rank sorts its own rows for experts, if all code that reads them can do with that."""
        try:
            return _Cutting(self, traced, how, sorts_apart=True).run()
        except SortedApartError:
            return _Cutting(self, traced, how, sorts_apart=False).run()

    def partition(
        self,
        chunk: TracedChunk,
        size: int,
        *,
        layouts: Mapping[int, Layout],
        marks: Mapping[int, Split],
        batch: Mapping[int, Split],
        joined: tuple[int, ...],
        attention: AttentionForm,
        ends: Ends,
        expert_ranks: int,
        sorts_apart: bool,
    ) -> Partitioned:
        """The chunk's pieces; inputs are known by their numbers."""
        given = [tuple(sorted(each.items())) for each in (layouts, marks, batch)]
        key = (
            chunk.code.key,
            chunk.code.targets,
            size,
            *given,
            joined,
            attention,
            ends,
            expert_ranks,
            sorts_apart,
        )
        if key not in self.known:
            self.known[key] = at_any_rows(
                chunk.code,
                expert_ranks,
                lambda code: partition(
                    code,
                    [str(number) for number in range(len(chunk.inputs))],
                    {str(number): layout for number, layout in layouts.items()},
                    size,
                    marks={str(number): mark for number, mark in marks.items()},
                    batch={str(number): part for number, part in batch.items()},
                    joined=joined,
                    attention=attention,
                    ends=ends,
                    sorts_apart=sorts_apart,
                ),
            )
        return self.known[key]


class _Cutting:
    def __init__(
        self, cuts: TensorCuts, traced: Traced, how: TensorCut, *, sorts_apart: bool
    ) -> None:
        self.cuts = cuts
        self.traced = traced
        self.how = how
        self.sorts_apart = sorts_apart
        self.orders = OwnOrders()
        self.place = f"$coordinate.{how.axis}"
        self.layouts: dict[str, Layout] = dict(how.params)
        self.batch = {name: self._dealt(dim) for name, dim in how.batch}
        self.marks: dict[str, Layout] = {n: Split(dim) for n, dim in how.sequence}
        self.marks |= self.batch
        self.values: dict[str, TracedValue] = {}
        self.chunks: list[TracedChunk] = []
        self.gathered: dict[str, None] = dict.fromkeys(traced.gathered)
        self.ends = EndsOfChunks(traced)
        self.next = 1 + max((chunk.piece_of for chunk in traced.chunks), default=-1)

    def run(self) -> Traced:
        for index, chunk in enumerate(self.traced.chunks):
            self._chunk(index, chunk)
        for name, value in self.traced.values.items():
            if name not in self.values:  # what other axes change
                self.values[name] = self._along(value, self._layout(name, self.layouts))
        return replace(
            self.traced,
            chunks=tuple(self._numbered()),
            values=self.values,
            gathered=tuple(self.gathered),
        )

    def _dealt(self, dim: int) -> Split:
        """How a leaf of the batch is cut. In a ring each rank has an early part and a late one, if there
        are as many, so that all of them see equally many keys at every turn."""
        shapes = {n: self.traced.values[n].spec.shape for n, _ in self.how.batch}
        pairs = all(shapes[n][d] % (2 * self.how.size) == 0 for n, d in self.how.batch)
        return (
            Split(dim, 2, mirrored=True) if pairs and self.how.attention.deals_pairs else Split(dim)
        )

    def _along(self, value: TracedValue, layout: Layout) -> TracedValue:
        """A Value of the program before, as one rank has it."""
        spec = value.spec
        if value.role != "param":
            spec = TensorType(
                local_shape(spec.shape, layout, self.how.size), spec.dtype, spec.bound
            )
        return replace(value, spec=spec, cut=(*value.cut, (self.how.axis, layout)))

    def _layout(self, name: str, table: Mapping[str, Layout]) -> Layout:
        """Of a Value; what is changed along another axis lies as what it was changed from, whose dims
        may have moved."""
        value = self.traced.values[name]
        if name in table or not value.source:
            return table.get(name, REPLICATED)
        layout = self._layout(value.source, table)
        if not isinstance(layout, Split) or layout.dim is None:
            return layout
        moved = len(value.spec.shape) - len(self.traced.values[value.source].spec.shape)
        return layout.along(layout.dim + moved)

    def _chunk(self, index: int, chunk: TracedChunk) -> None:
        layouts = {i: self._layout(n, self.layouts) for i, n in enumerate(chunk.inputs)}
        marks = {i: self._layout(n, self.marks) for i, n in enumerate(chunk.inputs)}
        batch = {i: self.batch[n] for i, n in enumerate(chunk.inputs) if n in self.batch}
        cut = {i: layout for i, layout in layouts.items() if layout != REPLICATED}
        marked = {i: mark for i, mark in marks.items() if isinstance(mark, Split)}
        ends = self.ends.of(chunk, self.layouts)
        if not (cut or marked or batch or ends.shared):
            self._as_it_is(chunk)
            return
        expert_ranks = dict(self.how.experts).get(chunk.whole, 1)
        rows = rows_of_experts(chunk.code, cut) if expert_ranks > 1 else None
        if rows is not None:
            self._on_own_rows(chunk, cut, rows)
            return
        values = (self.traced.values[name] for name in chunk.outputs)
        joined = tuple(
            i for i, value in enumerate(values) if value.role in (*RESULTS, "prediction")
        )
        inside, orders = self.orders.inside(cut)
        with refusing(chunk, self.how.call):
            parts = self.cuts.partition(
                chunk,
                self.how.size,
                layouts=inside,
                marks=marked,
                batch=batch,
                joined=joined,
                attention=self.how.attention,
                ends=ends,
                expert_ranks=expert_ranks,
                sorts_apart=self.sorts_apart,
            )
        if expert_ranks > 1:
            self._check_one_piece(chunk, parts)
        self.gathered |= {f"{self.how.axis}: {note}": None for note in parts.notes}
        _Pieces(self, index, chunk, parts, orders).add()

    def _check_one_piece(self, chunk: TracedChunk, parts: Partitioned) -> None:
        """Rows travel to sharded experts once, and once back."""
        if len(parts.pieces) == 1:
            return
        made = [change.source for change in parts.changes if change.source.op != "placeholder"]
        found = [f"{operator_name(node)} ({source_of(node)})" for node in made]
        raise TensorError(
            f"experts that are sharded would communicate along {self.how.axis} in between",
            call=self.how.call,
            requirement=7,
            details=[f"behind {', '.join(dict.fromkeys(found))}", f"in {_region(chunk)}"],
            legal="up and gate cut by column, down by row, and nothing but sums behind it; or leave "
            "them whole",
        )

    def _as_it_is(self, chunk: TracedChunk) -> None:
        """A chunk that all ranks compute alike."""
        self._whole_chunk(chunk, REPLICATED, REPLICATED)

    def _on_own_rows(self, chunk: TracedChunk, layouts: dict[int, Layout], rows: Split) -> None:
        """Sharded experts, each rank's rows of which are sorted apart: they take any number."""
        code = with_own_rows(chunk.code, layouts, rows, self.how.size)
        self._whole_chunk(replace(chunk, code=code), rows, PARTIAL)

    def _whole_chunk(self, chunk: TracedChunk, makes: Layout, of_params: Layout) -> None:
        """A chunk that is one piece."""
        for name in chunk.outputs:
            self.layouts.setdefault(name, makes)
        for name in (*chunk.inputs, *chunk.outputs):
            value = self.traced.values[name]
            layout = self.layouts.setdefault(name, self._layout(name, self.layouts))
            if name not in self.values and not value.source:
                self.values[name] = self._along(value, layout)
        self.chunks.append(
            replace(chunk, gradients=self._gradients(chunk, chunk.inputs, lambda name: of_params))
        )

    def _gradients(
        self, chunk: TracedChunk, inputs: tuple[str, ...], lies: Callable[[str], Layout]
    ) -> tuple[tuple[str, Layouts], ...]:
        """How gradients of the parameters among some inputs lie, along this axis and those before."""
        before = dict(chunk.gradients)
        known = {name: self.traced.values[name] for name in inputs if name in self.traced.values}
        params = [name for name, value in known.items() if value.role == "param"]
        return tuple((n, (*before.get(n, ()), (self.how.axis, lies(n)))) for n in params)

    @property
    def axes_before(self) -> list[str]:
        """The axes that were cut before this one."""
        return [axis for axis, _ in next(iter(self.traced.values.values())).cut]

    def _numbered(self) -> list[TracedChunk]:
        """The chunks with their places among those of equal tags."""
        total: dict[Any, int] = {}
        for chunk in self.chunks:
            total[chunk.tags] = total.get(chunk.tags, 0) + 1
        seen: dict[Any, int] = {}
        numbered = []
        for chunk in self.chunks:
            part = seen.get(chunk.tags, 0)
            seen[chunk.tags] = part + 1
            numbered.append(replace(chunk, part=part, parts=total[chunk.tags]))
        return numbered


class _Pieces:
    """The pieces of one chunk, and the Values between them."""

    def __init__(
        self,
        cutting: _Cutting,
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
                values[name] = cutting._along(value, cutting._layout(name, cutting.layouts))
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
            gradients=self.cutting._gradients(self.chunk, inputs, self._lies),
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
