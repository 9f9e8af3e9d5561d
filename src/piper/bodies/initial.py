"""Initial weights as code: what `make_model` did to each parameter in, one small body each out.

The model is built on fake tensors while every operation is recorded. The operations that lead to one
parameter, run with seeds that depend on its name alone, give its value on any rank: no rank ever
holds the whole model, and no strategy changes the weights.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piper.bodies.operators import draws_random
from piper.errors import Source, TraceError, is_users, user_source

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # of fake tensors


@dataclass(frozen=True)
class _Entry:
    """One recorded operation, and the memory it read and wrote."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    random: bool


@dataclass(frozen=True)
class Initializer:
    """The code that makes a tensor: one integer input, a seed, per random operation in it.

    `keys` names each random operation by the first tensor that it was drawn for, so that copies of a
    parameter, and what was computed from it, agree with it.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    keys: tuple[str, ...]


@dataclass
class Initializers:
    """The tape of a model's construction."""

    tape: list[_Entry] = field(default_factory=list)

    def bodies(self, tensors: Mapping[str, Tensor]) -> dict[str, Initializer]:
        """The code of each of these tensors, in whose order random operations are named."""
        keys: dict[int, str] = {}  # position on the tape -> key
        made = {}
        for name, tensor in tensors.items():
            positions = self._slice(tensor)
            if not positions:
                raise TraceError(
                    f"{name} is not made inside make_model",
                    legal="create parameters and buffers in the function given to trace",
                )
            random = [p for p in positions if self.tape[p].random]
            for number, position in enumerate(random):
                keys.setdefault(position, f"{name}#{number}")
            graph, constants = _build([self.tape[p] for p in positions], tensor)
            made[name] = Initializer(graph, constants, tuple(keys[p] for p in random))
        return made

    def value(self, tensor: Tensor) -> Tensor:
        """The real content of a tensor, which no random operation may lead to."""
        entries = [self.tape[p] for p in self._slice(tensor)]
        if not entries or any(entry.random for entry in entries):
            raise TraceError(
                f"make_model reads the value of a random tensor{_here()}",
                legal="initialisation by torch's operators, whatever they drew",
            )
        graph, constants = _build(entries, tensor)
        root = torch.nn.Module()
        for name, constant in constants.items():
            root.register_buffer(name, constant)
        with _no_modes():
            (value,) = fx.GraphModule(root, graph)()
            return value.detach()

    def _slice(self, tensor: Tensor) -> list[int]:
        """Positions of the operations that led to the present content of a tensor."""
        needed = {_storage(tensor)}
        found = []
        for position in reversed(range(len(self.tape))):
            if self.tape[position].writes & needed:
                found.append(position)
                needed |= self.tape[position].reads
        return found[::-1]


@contextlib.contextmanager
def recording() -> Iterator[Initializers]:
    """While a model is built on fake tensors; a TraceError where their values would be needed."""
    initializers = Initializers()
    try:
        with _Recorder(initializers), _Reader(initializers):
            yield initializers
    except READS_VALUES as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [Source(f.filename, f.lineno or 0) for f in frames if is_users(f.filename)]
        place = f" at {lines[-1]}" if lines else ""
        raise TraceError(
            f"make_model looks at the values of tensors{place} ({error.func})",
            legal="initialisation that does not branch on values",
        ) from error


class _Reader(TorchFunctionMode):
    """Methods that hand a tensor's memory to Python: a fake tensor has none, so they get the value."""

    def __init__(self, initializers: Initializers) -> None:
        super().__init__()
        self.initializers = initializers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        value = self.initializers.value(args[0])
        with _no_modes():
            result = func(value, *args[1:], **(kwargs or {}))
        if isinstance(result, np.ndarray):
            result.flags.writeable = False  # what is written to a copy would be lost
        return result


_READS = (
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__format__,
)


class _Recorder(TorchDispatchMode):
    def __init__(self, into: Initializers) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            value = self.into.value(args[0])
            with _no_modes():
                return value.item()
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"make_model draws from a generator of its own{_here()}",
                legal="no generator=: lower(seed=...) decides the initial weights",
            )
        result = func(*args, **kwargs)
        read = {_storage(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        wrote = {_storage(t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        if func._schema.is_mutable:
            wrote |= read
        # Views change nothing: whoever needs their memory finds the operations that wrote it.
        if wrote:
            kwargs |= _own_dtype(func, kwargs, result)
            random = draws_random(func, args, kwargs)
            entry = _Entry(func, args, kwargs, result, frozenset(read), frozenset(wrote), random)
            self.into.tape.append(entry)
        return result


def _own_dtype(func: Any, kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """What a function makes in the default dtype of this process, which others may not have."""
    takes = any(argument.name == "dtype" for argument in func._schema.arguments)
    if not takes or kwargs.get("dtype") is not None or not isinstance(result, Tensor):
        return {}
    other = result.is_floating_point() and result.dtype != torch.float32
    return {"dtype": result.dtype} if other else {}


def _here() -> str:
    source = user_source()
    return f" ({source})" if source else ""


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """Outside of fake tensors and recording, whatever is active."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Tensors that agree in this are strided views of each other."""
    return _storage(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


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
        base = latest.get(_kind(value))
        if base is None:
            raise TraceError(
                "make_model takes tensors that it did not make: weights from a file, for example",
                legal="initial weights made by operators, and program.lower(weights=PATH)",
            )
        size, stride, start = list(value.size()), list(value.stride()), value.storage_offset()
        return graph.call_function(torch.ops.aten.as_strided.default, (base, size, stride, start))

    latest: dict[tuple[Any, ...], fx.Node] = {}  # storage and dtype -> a node that lies in it
    seeds = {
        index: graph.placeholder(f"seed{index}") for index, e in enumerate(entries) if e.random
    }
    for index, entry in enumerate(entries):
        if entry.random:
            graph.call_function(torch.manual_seed, (seeds[index],))
        args, kwargs = pytree.tree_map(argument, (entry.args, entry.kwargs))
        node = graph.call_function(entry.operation, tuple(args), kwargs)
        results = entry.result if isinstance(entry.result, tuple | list) else [entry.result]
        for part, result in enumerate(results):
            if isinstance(result, Tensor):
                made = node
                if isinstance(entry.result, tuple | list):
                    made = graph.call_function(operator.getitem, (node, part))
                nodes[id(result)] = made
                latest.setdefault(_kind(result), made)
    made = _alias(tensor)
    if constants:  # in which it may lie; training changes it
        made = graph.call_function(torch.ops.aten.clone.default, (made,))
    graph.output((made,))
    return graph, constants
