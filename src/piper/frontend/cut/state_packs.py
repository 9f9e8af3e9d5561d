"""Packs: what a chunk leaves for its state, in few flat tensors; and how the state takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piper.bodies.captured_nodes import value_of
from piper.bodies.chunk_code import spec_of
from piper.bodies.folding import Fold, FoldPart, Given
from piper.frontend.capture.state_parts import StatePart
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True)
class Pack:
    """Tensors of one dtype, flat, one behind the other."""

    name: str
    type: TensorType
    nodes: tuple[fx.Node, ...]


def packs_of(chunk: int, state: Sequence[StatePart]) -> list[Pack]:
    """What is given to the state of a chunk, by dtype."""
    alike: dict[str, dict[fx.Node, None]] = {}
    for part in state:
        for node in part.given:
            alike.setdefault(spec_of(value_of(node)).dtype, {})[node] = None
    return [
        Pack(f"$state.{chunk}.{dtype}", TensorType((sum(map(_size, nodes)),), dtype), tuple(nodes))
        for dtype, nodes in alike.items()
    ]


def pack(graph: fx.Graph, packed: Pack, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Code at the end of a chunk's graph that makes a pack of the `copies` of its nodes."""
    flat = []
    for node in packed.nodes:
        detached = graph.call_method("detach", (copies[node],))
        flat.append(graph.call_method("reshape", (detached, (-1,))))
    return graph.call_function(torch.cat, (flat,))


def fold_of(
    state: Sequence[StatePart],
    packs: Sequence[Pack],
    *,
    inputs: Sequence[fx.Node],
    first: int,
    constants: Mapping[str, Tensor],
) -> Fold | None:
    """How the buffers among a chunk's `inputs` take the packs, its outputs from the `first` on."""
    if not state:
        return None
    lies: dict[fx.Node, Given] = {}
    for output, packed in enumerate(packs, first):
        offset = 0
        for node in packed.nodes:
            lies[node] = Given(output, offset, tuple(value_of(node).shape))
            offset += _size(node)
    parts = tuple(
        FoldPart(
            graph=part.graph,
            constants={
                str(n.target): constants[str(n.target)]
                for n in part.graph.nodes
                if n.op == "get_attr"
            },
            buffers=tuple(inputs.index(buffer) for buffer in part.buffers),
            given=tuple(lies[node] for node in part.given),
        )
        for part in state
    )
    return Fold(parts, tuple(range(first, first + len(packs))))


def _size(node: fx.Node) -> int:
    return math.prod(value_of(node).shape)
