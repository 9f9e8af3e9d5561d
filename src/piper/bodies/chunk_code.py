"""ChunkCode: the captured code of one chunk and what its surroundings ask of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from piper.bodies.casts import casts_words
from piper.bodies.checkpoint_regions import region_words
from piper.bodies.folding import Fold, FoldPart
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True)
class ChunkInput:
    """One input of a chunk: `param` marks parameters and buffers that stay the same during a step,
    `carried` buffers that each microbatch changes for the next one, `grad` that its gradient is wanted.
    What is gathered can be had `again`: a backward reads it, instead of what was put together of it.
    """

    spec: TensorType
    param: bool
    requires_grad: bool
    grad: bool
    carried: bool = False
    again: bool = False


@dataclass(frozen=True)
class ChunkCode:
    """`graph` has a placeholder per input and one output tuple; `tangents` numbers the outputs that
    receive a gradient."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[ChunkInput, ...]
    outputs: tuple[TensorType, ...]
    tangents: tuple[int, ...]
    fold: Fold | None = None  # what it leaves for buffers that it changes, and how they take it

    @cached_property
    def key(self) -> str:
        """Equal for chunks whose bodies are equal: the code up to names, with all inputs' facts."""
        words: list[str] = [repr(self.inputs), repr(self.outputs), repr(self.tangents)]
        words += graph_words(self.graph, self.constants)
        for part in self._parts:
            words += [repr((part.buffers, part.given)), *graph_words(part.graph, part.constants)]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The called functions themselves: two may have the same name."""
        graphs = (self.graph, *(part.graph for part in self._parts))
        return tuple(id(n.target) for g in graphs for n in g.nodes if n.op == "call_function")

    @property
    def _parts(self) -> tuple[FoldPart, ...]:
        return self.fold.parts if self.fold else ()


def graph_words(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> Iterator[str]:
    """A graph's code up to names, a line a node."""
    number: dict[fx.Node, str] = {}
    casts, regions = casts_words(graph.nodes), region_words(graph.nodes)
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Number(number[n]))
        target = "" if node.op == "placeholder" else _identity(node.target)
        if node.op == "get_attr":
            target = repr(constant_data(constants[str(node.target)]))
        modes = f"{casts.get(node, '')} {regions.get(node, '')}"
        yield f"{node.op} {target} {args!r} {kwargs!r} {modes}"


class _Number(str):
    """A node's number, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _identity(target: Any) -> str:
    if isinstance(target, str):
        return target
    words = [getattr(target, name, "") for name in ("__module__", "__qualname__", "__name__")]
    return ".".join(words) if any(words) else str(target)


def constant_data(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    """A constant's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return dtype_name(tensor.dtype), list(tensor.shape), data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> TensorType:
    """The type of a fake tensor; a symbolic dim 0 depends on the data, and its hint is a bound."""
    dynamic = bool(tensor.dim()) and not isinstance(tensor.shape[0], int)
    shape = tuple(n if isinstance(n, int) else int(n.node.hint) for n in tensor.shape)
    return TensorType(shape, dtype_name(tensor.dtype), shape[0] if dynamic else None)
