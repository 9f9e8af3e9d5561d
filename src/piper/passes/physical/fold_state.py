"""State: what forwards leave for buffers in; Folds, one microbatch after the other, out.

What the data ranks leave is gathered first, so that all of them fold the same.
"""

from __future__ import annotations

import msgspec

from piper.ir.layouts import REPLICATED
from piper.ir.nodes import TRACED, Chunk, Fold
from piper.ir.tensor_type import TensorType
from piper.passes.physical.draft import Draft
from piper.passes.physical.relayout import Way, collective, laid
from piper.plan.body_spec import BodySpec


class StateChain:
    """The content of every buffer, after the microbatches that were bound so far."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._now: dict[str, str] = {}  # buffer -> the Value of its content

    def content(self, name: str) -> str:
        """What a chunk reads of a buffer, or of any other Value, which is that itself."""
        return self._now.get(name, name)

    def fold(self, node: Chunk, body: BodySpec, inputs: list[str], outputs: list[str]) -> None:
        """Change the buffers among a forward's inputs by the statistics among its outputs."""
        buffers = [inputs[ref.index] for ref in body.outputs]
        given = [outputs[ref.index] for ref in body.inputs if ref.kind == "output"]
        name = node.name.replace("F", "S", 1)
        self.draft.node(
            Fold(
                name=name,
                tags=node.tags,
                body=body.hash,
                inputs=(*buffers, *(self._gathered(node, statistic) for statistic in given)),
                outputs=tuple(self._next(node, buffer, name) for buffer in buffers),
                slice=node.slice,
            )
        )

    def _next(self, node: Chunk, content: str, fold: str) -> str:
        value = self.draft.values[content]
        buffer = value.place or content
        name = f"{buffer}~{fold}"
        self._now[buffer] = self.draft.like(value, name, node.slice, role="updated", place=buffer)
        return name

    def _gathered(self, node: Chunk, statistic: str) -> str:
        """A statistic of all data ranks, one behind the other."""
        made = self.draft.values[statistic]
        axes = tuple(axis for axis, _ in made.layout)
        size = made.shape[0] * self.draft.logical.mesh.size_of(axes)
        read = msgspec.structs.replace(
            made,
            name=f"{statistic}~all",
            type=TensorType((size,), made.dtype),
            layout=laid(made.layout, axes, REPLICATED),
        )
        owner = next(iter(node.owners), None)
        stream, origin = (owner.stream, owner.origin) if owner else (node.stream, TRACED)
        assert node.slice is not None
        way = Way(f"gather>{statistic}", node.slice, stream, origin, node.tags)
        comm = collective(self.draft.logical.mesh, made, read, way)
        if comm is None:
            return statistic
        self.draft.node(comm)
        return self.draft.value(read)
