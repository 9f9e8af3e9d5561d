"""route: the exchanges around a sharded chunk, so that rows meet their experts and come back."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from piper.errors import PlanError
from piper.ir.layouts import Layouts, Routed, as_routed
from piper.ir.nodes import COMPUTE, Chunk, Owner, Read
from piper.ir.routing import ExpertForm
from piper.ir.tensor_type import TensorType
from piper.ir.values import Value
from piper.mesh import Group
from piper.passes.physical.draft import Draft, lane
from piper.passes.physical.relayout import Way, collective


@dataclass(frozen=True)
class Route:
    """How one sharded chunk of one microbatch gets its rows; its backward travels the same way.

    `owner` owns the axes along which experts are split.
    """

    chunk: Chunk
    owner: Owner
    axes: tuple[str, ...]
    form: ExpertForm
    size: int
    reads: tuple[Layouts, ...]  # how the chunk reads its inputs

    @property
    def splits(self) -> str:
        return f"$splits.{self.chunk.name}"

    def carries(self, layouts: Layouts) -> bool:
        """Whether these are the layouts of rows that this route brings to their experts."""
        counts = self.chunk.inputs[self.form.counts]
        return all(layout == Routed(counts) for axis, layout in layouts if axis in self.axes)

    def dispatch(self, draft: Draft, inputs: list[str]) -> list[str]:
        """Exchange counts, read them on the host, exchange rows; returns the inputs as received."""
        counts = inputs[self.form.counts]
        traced = draft.values[counts]
        shape = (self.size, self.form.num_experts // self.size)
        received = draft.like(
            traced,
            f"{counts}>{self.chunk.name}",
            self.chunk.slice,
            type=TensorType(shape, traced.dtype),
            layout=self.reads[self.form.counts],
            cut=as_routed(traced.cut, self.reads[self.form.counts]),
        )
        self._exchange(draft, f"counts>{self.chunk.name}", counts, received, self.chunk)
        assert self.chunk.slice is not None
        splits = TensorType((2, self.size), "int64")
        draft.node(
            Read(
                name=f"read>{self.chunk.name}",
                tags=self.chunk.tags,
                inputs=(counts, received),
                outputs=(
                    draft.value(Value(self.splits, "splits", splits, slice=self.chunk.slice)),
                ),
                slice=self.chunk.slice,
                origin=self.owner.origin,
                group=Group((self.chunk.slice,), self.axes),
                stream=self._reading(draft),
            )
        )
        arrived = list(inputs)
        arrived[self.form.counts] = received
        sent: dict[str, str] = {}  # what is read in two layouts travels once
        for index, position in enumerate(self.form.rows):
            name, label = inputs[position], f"rows{index}>{self.chunk.name}"
            if name not in sent:
                sent[name] = self.send_rows(draft, name, self.reads[position], self.chunk, label)
            arrived[position] = sent[name]
        return arrived

    def send_again(self, draft: Draft, position: int, name: str, chunk: Chunk) -> str:
        """An input that was made again to where it is computed with again, by the counts of the first
        time; what is read twice travels once."""
        read = self.reads[position]
        label = f"rows>{name}>{chunk.name}"
        arrived = f"{name}>{chunk.name}"
        return (
            arrived if arrived in draft.values else self.send_rows(draft, name, read, chunk, label)
        )

    def send_rows(self, draft: Draft, name: str, read: Layouts, chunk: Chunk, label: str) -> str:
        """Rows from where they are to where their experts are."""
        rows = draft.values[name]
        bound = rows.shape[0] * self.size
        sent = draft.like(
            rows,
            f"{name}>{chunk.name}",
            chunk.slice,
            type=msgspec.structs.replace(rows.type, bound=bound),
            layout=read,
            cut=as_routed(rows.cut, read),
        )
        self._exchange(draft, label, name, sent, chunk, splits=self.splits)
        return sent

    def give_back(self, draft: Draft, routed: str, plain: Value, *, chunk: Chunk) -> None:
        """Results from the experts back to where the rows came from."""
        label = f"{chunk.name}>{plain.name}"
        self._exchange(draft, label, routed, draft.value(plain), chunk, splits=self.splits)

    def _exchange(
        self, draft: Draft, label: str, source: str, result: str, chunk: Chunk, *, splits: str = ""
    ) -> None:
        assert chunk.slice is not None
        way = Way(label, chunk.slice, self._stream(draft, chunk), self.owner.origin, chunk.tags)
        values, mesh = draft.values, draft.logical.mesh
        comm = collective(mesh, values[source], values[result], way, splits=splits)
        if comm is None or comm.comm != "all_to_all":
            raise PlanError(f"{source} is not laid out for the experts of {chunk.name}")
        draft.node(comm)

    def _reading(self, draft: Draft) -> str:
        """A device reads behind the counts, and not behind a chunk that takes its turn meanwhile. On a
        CPU chunks hold up the host themselves, and exchanges are not to hold up the read."""
        return COMPUTE if draft.device == "cpu" else self._stream(draft, self.chunk)

    def _stream(self, draft: Draft, chunk: Chunk) -> str:
        """Backwards have a lane of their own, so that one takes turns with another's forward."""
        back = chunk.phase != "F"
        return lane(draft.logical, self.owner.stream, back % draft.lanes)


def routed_form(
    reads: list[Layouts], names: tuple[str, ...], exchanged: list[int], num_experts: int
) -> ExpertForm:
    """Which inputs are counts and rows, as the layouts say in which a chunk reads them."""
    by = {
        layout.by for index in exchanged for _, layout in reads[index] if isinstance(layout, Routed)
    }
    counts = [index for index in exchanged if names[index] in by]
    if len(by) != 1 or len(counts) != 1:
        raise PlanError(
            "rows are routed by other counts than those of their region", details=sorted(by)
        )
    rows = tuple(index for index in exchanged if index != counts[0])
    return ExpertForm(counts[0], rows, num_experts)
