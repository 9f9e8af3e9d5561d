"""Lifted: a step whose own casts to a narrower dtype (`.float()`, `dtype=torch.bfloat16`) make float64.

A float64 model whose code casts computes parts of itself in float32. Whatever passes through them can be
compared no more finely. A lifted step computes all of it in float64. In eager mode a torch function
mode around the step does so. While Dynamo traces, the same mode is on, so that the step's Python code
sees the same dtypes; then the same rules are applied to the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from piper.bodies.captured_nodes import value_of
from piper.bodies.leaves import tensors_in

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_METHODS = {"half": "double", "bfloat16": "double", "float": "double", "cfloat": "cdouble"}
_FUNCTIONS = {getattr(Tensor, name): getattr(Tensor, wide) for name, wide in _METHODS.items()}


@dataclass(frozen=True)
class LiftedStep:
    """The user's step, lifted."""

    step: Callable[[nn.Module, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with _Lifting():
            return self.step(model, batch)


@contextlib.contextmanager
def as_traced(step: Callable[[nn.Module, Any], Any]) -> Iterator[Callable[[nn.Module, Any], Any]]:
    """What Dynamo is given of a step, while it traces. Its fake tensors meet the mode, its graph does
    not: `lift` changes that afterwards."""
    if not isinstance(step, LiftedStep):
        yield step
        return
    with _Lifting():
        yield step.step


def lift(graph: fx.Graph) -> None:
    """A graph that was traced under the mode computes what the mode did."""
    for node in list(graph.nodes):
        if not node.op.startswith("call"):
            continue
        if node.op == "call_method":
            node.target = _METHODS.get(node.target, node.target)
        if node.target != "view":
            node.args, node.kwargs = _widened(node.args), _widened(node.kwargs)
        if isinstance(value := value_of(node), Tensor) and _may_be_narrow(node, value):
            with graph.inserting_after(node):
                wide = graph.call_method("to", (node, value.dtype))
            wide.meta = dict(node.meta)
            node.replace_all_uses_with(
                wide, delete_user_cb=lambda user, wide=wide: user is not wide
            )


def _may_be_narrow(node: fx.Node, value: Tensor) -> bool:
    """Whether the node alone might make less than it made under the mode: of no number of floating
    point, or of a narrow one."""
    if value.dtype not in WIDE.values():
        return False
    inputs = [t.dtype for arg in node.all_input_nodes for t in tensors_in(value_of(arg))]
    floating = [dtype for dtype in inputs if dtype.is_floating_point or dtype.is_complex]
    return not floating or any(dtype in WIDE for dtype in floating)


def _widened(argument: Any) -> Any:
    """The same arguments with wide dtypes, in words that every Dynamo can trace."""
    if isinstance(argument, torch.dtype):
        return WIDE.get(argument, argument)
    if type(argument) is tuple:
        return tuple([_widened(part) for part in argument])
    if type(argument) is list:
        return [_widened(part) for part in argument]
    if isinstance(argument, dict):
        return {name: _widened(part) for name, part in argument.items()}
    return argument


class _Lifting(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = _FUNCTIONS.get(func, func)
        if func is not Tensor.view:  # there a dtype says how bits are read
            args, kwargs = _widened(tuple(args)), _widened(dict(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        # Of a factory, or of integers divided: float32 that nobody asked for.
        if isinstance(result, Tensor) and result.dtype in WIDE:
            return result.to(WIDE[result.dtype])
        return result
