"""Initial weights as code: what `make_model` did to each parameter in, one small body each out.

The model is built on fake tensors while every operation is recorded. The operations that lead to one
parameter, run with a seed that depends on its name alone, give its value on any rank: no rank ever
holds the whole model, and no strategy changes the weights.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piper.errors import TraceError


@dataclass(frozen=True)
class _Entry:
    """One recorded operation, and the memory it read and wrote."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class Initializers:
    """The tape of a model's construction."""

    tape: list[_Entry] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # so that no storage's address is used twice

    def body(self, tensor: Tensor, name: str) -> tuple[fx.Graph, dict[str, Tensor]]:
        """The code that makes the present content of `tensor`, as a graph without inputs."""
        needed = {_storage(tensor)}
        entries = []
        for entry in reversed(self.tape):
            if entry.writes & needed:
                entries.append(entry)
                needed |= entry.reads
        if not entries:
            raise TraceError(
                f"{name} is not made inside make_model",
                legal="create parameters and buffers in the function given to trace",
            )
        return _build(entries[::-1], tensor)


@contextlib.contextmanager
def recording() -> Iterator[Initializers]:
    found = Initializers()
    with _Recorder(found):
        yield found


class _Recorder(TorchDispatchMode):
    def __init__(self, into: Initializers) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = {_storage(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        wrote = {_storage(t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        if func._schema.is_mutable:
            wrote |= read
        # Views change nothing: whoever needs their memory finds the operations that wrote it.
        if wrote:
            entry = _Entry(func, args, kwargs, result, frozenset(read), frozenset(wrote))
            self.into.tape.append(entry)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _build(entries: list[_Entry], tensor: Tensor) -> tuple[fx.Graph, dict[str, Tensor]]:
    graph = fx.Graph()
    constants: dict[str, Tensor] = {}
    nodes: dict[int, fx.Node] = {}  # id of a recorded tensor -> its node

    def argument(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in nodes:
            return nodes[id(value)]
        if not isinstance(value, FakeTensor):
            name = f"constant{len(constants)}"
            constants[name] = value
            nodes[id(value)] = graph.get_attr(name)
            return nodes[id(value)]
        return _alias(value)

    def _alias(value: Tensor) -> fx.Node:
        """A tensor object that no operation returned (a Parameter around one): same memory."""
        base = latest[_storage(value)]
        size, stride, start = list(value.size()), list(value.stride()), value.storage_offset()
        return graph.call_function(torch.ops.aten.as_strided.default, (base, size, stride, start))

    latest: dict[int, fx.Node] = {}  # storage -> a node that lies in it
    for entry in entries:
        args, kwargs = pytree.tree_map(argument, (entry.args, entry.kwargs))
        node = graph.call_function(entry.operation, tuple(args), kwargs)
        results = entry.result if isinstance(entry.result, tuple | list) else [entry.result]
        for index, result in enumerate(results):
            if isinstance(result, Tensor):
                made = node
                if isinstance(entry.result, tuple | list):
                    made = graph.call_function(operator.getitem, (node, index))
                nodes[id(result)] = made
                latest.setdefault(_storage(result), made)
    graph.output((_alias(tensor),))
    return graph, constants
