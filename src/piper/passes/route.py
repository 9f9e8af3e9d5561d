"""route: the exchanges around a sharded chunk, so that rows meet their experts and come back."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.nodes import Chunk, Comm, Read
from piper.ir.routing import ExpertForm
from piper.ir.values import Value
from piper.mesh import Group
from piper.passes.draft import Draft


@dataclass(frozen=True)
class Route:
    """How one sharded chunk of one microbatch gets its rows; its backward travels the same way."""

    chunk: Chunk
    form: ExpertForm
    axes: tuple[str, ...]
    size: int

    @property
    def group(self) -> Group:
        assert self.chunk.slice is not None
        return Group((self.chunk.slice,), self.axes)

    @property
    def splits(self) -> str:
        return f"$splits.{self.chunk.name}"

    def dispatch(self, draft: Draft, inputs: list[str]) -> list[str]:
        """Exchange counts, read them on the host, exchange rows; returns the inputs as received."""
        counts = inputs[self.form.counts]
        traced = draft.values[counts]
        shape = (self.size, self.form.num_experts // self.size)
        received = draft.like(traced, f"{counts}>{self.chunk.name}", self.chunk.slice, shape=shape)
        self._comm(draft, f"counts>{self.chunk.name}", (counts,), received, self.chunk)
        splits = Value(self.splits, "splits", (2, self.size), "int64", slice=self.chunk.slice)
        draft.node(
            Read(
                name=f"read>{self.chunk.name}",
                tags=self.chunk.tags,
                inputs=(counts, received),
                outputs=(draft.value(splits),),
                slice=self.chunk.slice,
                origin=self._origin,
                group=self.group,
            )
        )
        found = list(inputs)
        found[self.form.counts] = received
        rows = self.send_rows(draft, [inputs[i] for i in self.form.rows], self.chunk, "")
        for index, name in zip(self.form.rows, rows, strict=True):
            found[index] = name
        return found

    def send_rows(self, draft: Draft, names: list[str], chunk: Chunk, suffix: str) -> list[str]:
        """Rows from where they are to where their experts are."""
        found = []
        for index, name in enumerate(names):
            value = draft.values[name]
            sent = draft.like(
                value, f"{name}>{chunk.name}", chunk.slice, bound=value.shape[0] * self.size
            )
            label = f"rows{index}{suffix}>{chunk.name}"
            self._comm(draft, label, (name, self.splits), sent, chunk)
            found.append(sent)
        return found

    def give_back(self, draft: Draft, local: str, plain: Value, *, chunk: Chunk) -> None:
        """Results from the experts back to where the rows came from."""
        label = f"{chunk.name}>{plain.name}"
        self._comm(draft, label, (local, self.splits), draft.value(plain), chunk, reverse=True)

    @property
    def _origin(self) -> int:
        return next(owner.origin for owner in self.chunk.owners if owner.how == "shard")

    def _comm(
        self,
        draft: Draft,
        name: str,
        inputs: tuple[str, ...],
        output: str,
        chunk: Chunk,
        *,
        reverse: bool = False,
    ) -> None:
        stream = next(owner.stream for owner in chunk.owners if owner.how == "shard")
        draft.node(
            Comm(
                name=name,
                tags=chunk.tags,
                inputs=inputs,
                outputs=(output,),
                slice=chunk.slice,
                stream=stream,
                origin=self._origin,
                comm="all_to_all",
                group=self.group,
                key=name,
                reverse=reverse,
            )
        )
