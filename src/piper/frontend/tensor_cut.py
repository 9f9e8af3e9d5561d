"""Tensor cuts: a traced program in; the same as one rank of an axis that shares tensors runs it out.

Chunks come in pieces, cut wherever a layout changes. A Value that is read in another layout than it is
made in has a Value of its own for that, whose `source` it is: passes turn the difference into
communication. One axis at a time: what comes out for one is cut for the next.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from piper.bodies.captured_nodes import source_of
from piper.bodies.tensor.changes import Ends, SortedApartError
from piper.bodies.tensor.cut_over_ranks import Partitioned, partition
from piper.bodies.tensor.rows_by_data import at_any_rows
from piper.bodies.tensor.rules.rule_table import operator_name
from piper.errors import AxisError, Call, TensorError, TraceError
from piper.frontend.ends_of_chunks import EndsOfChunks
from piper.frontend.own_orders import OwnOrders, rows_of_experts, with_own_rows
from piper.frontend.tensor_pieces import PiecesOfChunk
from piper.frontend.traced import Traced, TracedChunk, TracedValue
from piper.ir.attention_forms import GATHER, AttentionForm
from piper.ir.layouts import PARTIAL, REPLICATED, Layout, Layouts, Split, local_shape
from piper.ir.nodes import label
from piper.ir.tensor_type import TensorType
from piper.ir.values import RESULTS

Dims = tuple[tuple[str, int], ...]  # leaves of the batch, each with a dim


@dataclass(frozen=True)
class TensorCut:
    """What the ranks of an axis share: `params` lie so, `sequence` names dims along which activations
    between matrices may be split, `batch` leaves of which each rank takes its part, and `attention`
    what moves where sequences are split. Products compute their tokens in `strips`. Chunks of `experts`
    are sharded over so many ranks, those `over_axis` also over the ranks of this axis."""

    axis: str
    size: int
    params: tuple[tuple[str, Split], ...] = ()
    sequence: Dims = ()
    batch: Dims = ()
    attention: AttentionForm = GATHER
    strips: int = 1
    experts: tuple[tuple[int, int], ...] = ()
    over_axis: frozenset[int] = frozenset()
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
            return Cutting(self, traced, how, sorts_apart=True).run()
        except (SortedApartError, AxisError) as error:
            if how.over_axis and isinstance(error, SortedApartError):
                raise _together(how, str(error)) from error
            if how.over_axis:
                raise
            return Cutting(self, traced, how, sorts_apart=False).run()

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
        strips: int,
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
            strips,
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
                    strips=strips,
                ),
            )
        return self.known[key]


class Cutting:
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
        for chunk in traced.chunks:
            if chunk.whole in how.over_axis:
                params = (n for n in chunk.inputs if traced.values[n].role == "param")
                self.layouts |= dict.fromkeys(params, Split(0))
        dealt = [(name, dim) for name, dim in how.batch if name in traced.values]
        self.batch = {name: self._dealt(dim) for name, dim in dealt}
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
        self._check_readers()
        for name, value in self.traced.values.items():
            if name not in self.values:  # what other axes change
                self.values[name] = self.along(value, self.layout(name, self.layouts))
        return replace(
            self.traced,
            chunks=tuple(self._numbered()),
            values=self.values,
            gathered=tuple(self.gathered),
        )

    def _check_readers(self) -> None:
        """Raise where a parameter's gradient is equal on all ranks in one chunk and a term of a sum in
        another: rows that are sorted together may mend that."""
        found: dict[str, set[Layout]] = {}
        for chunk in self.chunks if self.orders.num else ():
            for name, ways in chunk.gradients:
                found.setdefault(name, set()).add(dict(ways)[self.how.axis])
        for name, lies in found.items():
            if {PARTIAL, REPLICATED} <= lies:
                raise SortedApartError(f"{name} is read by code that is equal on all ranks, too")

    def _dealt(self, dim: int) -> Split:
        """How a leaf of the batch is cut. In a ring each rank has an early part and a late one, if there
        are as many, so that all of them see equally many keys at every turn."""
        read = [(n, d) for n, d in self.how.batch if n in self.traced.values]
        shapes = [(self.traced.values[n].spec.shape, d) for n, d in read]
        pairs = all(shape[d] % (2 * self.how.size) == 0 for shape, d in shapes)
        return (
            Split(dim, 2, mirrored=True) if pairs and self.how.attention.deals_pairs else Split(dim)
        )

    def along(self, value: TracedValue, layout: Layout) -> TracedValue:
        """A Value of the program before, as one rank has it."""
        spec = value.spec
        if value.role != "param":
            spec = TensorType(
                local_shape(spec.shape, layout, self.how.size), spec.dtype, spec.bound
            )
        return replace(value, spec=spec, cut=(*value.cut, (self.how.axis, layout)))

    def layout(self, name: str, table: Mapping[str, Layout]) -> Layout:
        """Of a Value; what is changed along another axis lies as what it was changed from, whose dims
        may have moved."""
        value = self.traced.values[name]
        if name in table or not value.source:
            return table.get(name, REPLICATED)
        layout = self.layout(value.source, table)
        if not isinstance(layout, Split) or layout.dim is None:
            return layout
        moved = len(value.spec.shape) - len(self.traced.values[value.source].spec.shape)
        return layout.along(layout.dim + moved)

    def _chunk(self, index: int, chunk: TracedChunk) -> None:
        layouts = {i: self.layout(n, self.layouts) for i, n in enumerate(chunk.inputs)}
        if chunk.whole in self.how.over_axis:
            self._over_axis(chunk, layouts)
            return
        marks = {i: self.layout(n, self.marks) for i, n in enumerate(chunk.inputs)}
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
                strips=1 if expert_ranks > 1 else self.how.strips,
            )
        if expert_ranks > 1:
            self._check_one_piece(chunk, parts)
        self.gathered |= {f"{self.how.axis}: {note}": None for note in parts.notes}
        PiecesOfChunk(self, index, chunk, parts, orders).add()

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

    def _over_axis(self, chunk: TracedChunk, layouts: dict[int, Layout]) -> None:
        """Experts that are sharded over the axis: each of its ranks sends its own rows."""
        given = {
            i: way for i, way in layouts.items() if way != REPLICATED and not _is_param(chunk, i)
        }
        rows = rows_of_experts(chunk.code, given)
        if rows is None:
            raise _together(self.how, *self._made_whole(chunk))
        self._on_own_rows(chunk, given, rows, of_params=Split(0))

    def _made_whole(self, chunk: TracedChunk) -> Iterator[str]:
        """What makes the rows that a chunk reads."""
        for index, name in enumerate(chunk.inputs):
            for maker in self.traced.chunks if not _is_param(chunk, index) else ():
                if name in maker.outputs:
                    results = next(iter(reversed(maker.code.graph.nodes))).args[0]
                    node = results[maker.outputs.index(name)]
                    node = node.args[0] if node.target is operator.getitem else node
                    yield f"all get those that {operator_name(node)} makes ({source_of(node)})"

    def _on_own_rows(
        self,
        chunk: TracedChunk,
        layouts: dict[int, Layout],
        rows: Split,
        of_params: Layout = PARTIAL,
    ) -> None:
        """Sharded experts, each rank's rows of which are sorted apart: they take any number."""
        code = with_own_rows(chunk.code, layouts, rows, self.how.size)
        self._whole_chunk(replace(chunk, code=code), rows, of_params)

    def _whole_chunk(self, chunk: TracedChunk, makes: Layout, of_params: Layout) -> None:
        """A chunk that is one piece."""
        for name in chunk.outputs:
            self.layouts.setdefault(name, makes)
        for name in (*chunk.inputs, *chunk.outputs):
            value = self.traced.values[name]
            layout = self.layouts.setdefault(name, self.layout(name, self.layouts))
            if name not in self.values and not value.source:
                self.values[name] = self.along(value, layout)
        self.chunks.append(
            replace(chunk, gradients=self.gradients(chunk, chunk.inputs, lambda name: of_params))
        )

    def gradients(
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


def _is_param(chunk: TracedChunk, index: int) -> bool:
    return chunk.code.inputs[index].param


def _together(how: TensorCut, *reasons: str) -> TensorError:
    return TensorError(
        f"experts cannot be sharded over {how.axis}, whose ranks do not each have rows of their own",
        call=how.call,
        requirement=8,
        details=list(dict.fromkeys(reasons)),
        legal=f"sequence= or batch= in shard_tensor over {how.axis}, and piper.mixture, which sorts "
        "rows and puts them back; or shard over another axis",
    )
