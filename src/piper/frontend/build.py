"""The logical graph of a traced program: forward and backward chunks and all Values between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from piper.frontend.traced import Traced, TracedChunk
from piper.ir.graph import Graph
from piper.ir.layouts import SHARED, Layout, dual, whole_type
from piper.ir.nodes import Chunk, Node, label
from piper.ir.tensor_type import TensorType
from piper.ir.values import Role, Value, read_along

SEED = "$one"  # the gradient of the loss with respect to itself


def build_graph(
    traced: Traced, layouts: Mapping[str, Layout], sizes: Mapping[str, int] | None = None
) -> Graph:
    """`layouts` has, per traced Value, how it lies along the batch; `sizes` the number of ranks along
    each axis that shares tensors."""
    sizes = sizes or {}
    values = {
        name: Value(
            name,
            value.role,
            value.spec if value.role == "param" else whole_type(value.spec, value.cut, sizes),
            batch=layouts[name],
            of=value.of,
            cut=value.cut,
            source=value.source,
        )
        for name, value in traced.values.items()
    }
    nodes: dict[str, Node] = {}
    backward: list[Node] = []
    readers = _Readers(traced)
    for index, chunk in enumerate(traced.chunks):
        saved = f"$saved.{index}"
        forward = _node("F", index, chunk, chunk.inputs, chunk.outputs)
        if chunk.code.tangents:
            values[saved] = Value(saved, "saved")
            forward = _node("F", index, chunk, chunk.inputs, (*chunk.outputs, saved))
            grads = _gradients(index, chunk, traced, values)
            tangents = _tangents(chunk, traced, values, readers)
            inputs = (saved, *tangents)
            backward.append(_node("B", index, chunk, inputs, grads, forward=forward.name))
        nodes[forward.name] = forward
    for node in reversed(backward):
        nodes[node.name] = node
    return Graph(
        "logical", nodes, values, loss=traced.loss, count=traced.count, metrics=traced.metrics
    )


class _Readers:
    """Who contributes to the gradient of a Value: its readers, and those of it in another layout."""

    def __init__(self, traced: Traced) -> None:
        self.own: dict[str, list[str]] = {}
        self.elsewhere: dict[str, list[str]] = {}  # Value -> the same in other layouts
        for index, chunk in enumerate(traced.chunks):
            for name, taken in zip(chunk.inputs, chunk.code.inputs, strict=True):
                if taken.grad and chunk.code.tangents:  # else no gradient leaves the chunk
                    self.own.setdefault(name, []).append(gradient_name(name, index))
        for name, value in traced.values.items():
            if value.source:
                self.elsewhere.setdefault(value.source, []).append(name)

    def of(self, name: str) -> Iterator[str]:
        yield from self.own.get(name, ())
        for other in self.elsewhere.get(name, ()):
            yield from self.of(other)


def gradient_name(value: str, chunk: int) -> str:
    """What chunk `chunk` contributes to the gradient of `value`."""
    return f"$d.{value}/{chunk}"


def _node(
    phase: str,
    index: int,
    chunk: TracedChunk,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    forward: str = "",
) -> Chunk:
    return Chunk(
        name=label(phase, chunk.tags, part=chunk.part, parts=chunk.parts),
        phase=phase,  # type: ignore[arg-type]
        tags=chunk.tags,
        chunk=index,
        part=chunk.part,
        body=chunk.code.key,
        inputs=inputs,
        outputs=outputs,
        forward=forward,
        checkpoint=chunk.checkpoint,
        piece_of=chunk.piece_of,
    )


def _gradients(
    index: int, chunk: TracedChunk, traced: Traced, values: dict[str, Value]
) -> tuple[str, ...]:
    gradients = []
    for name, taken in zip(chunk.inputs, chunk.code.inputs, strict=True):
        if taken.grad:
            grad = gradient_name(name, index)
            role: Role = "param_grad" if traced.values[name].role == "param" else "grad"
            value = values[name]
            batch = dual(read_along(value, "", "batch", ""))
            cut = tuple((axis, dual(layout)) for axis, layout in value.cut)
            if role == "param_grad":
                cut = dict(chunk.gradients).get(name, ())
            values[grad] = Value(grad, role, value.type, batch=batch, of=name, cut=cut)
            gradients.append(grad)
    return tuple(gradients)


def _tangents(
    chunk: TracedChunk, traced: Traced, values: dict[str, Value], readers: _Readers
) -> tuple[str, ...]:
    """All contributions to the gradients of a chunk's outputs, also by those who read one in another
    layout; several to one output are added."""
    tangents = []
    for position in chunk.code.tangents:
        name = chunk.outputs[position]
        if name == traced.loss:
            type = TensorType((), traced.values[name].spec.dtype)
            cut = tuple((axis, dual(way)) for axis, way in values[name].cut)
            values[SEED] = Value(SEED, "constant", type, batch=SHARED, of=name, cut=cut)
            tangents.append(SEED)
        tangents += readers.of(name)
    return tuple(tangents)
