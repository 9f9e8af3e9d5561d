"""Float32Mode: eager code under it computes in float32 where `lower(precision="bf16")` does.

It has the table of operators in common with Piper, and nothing else: each call is seen by torch's own
protocol while it runs, where Piper puts casts into a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from piper.bodies.operator_dtypes import (
    Rule,
    moves_by_name,
    names_dtype,
    operator_name,
    rule_of_name,
)

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """What made a tensor, which is kept so that no other has its id."""

    number: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Tensor
    version: int

    @property
    def name(self) -> str:
        return operator_name(getattr(self.func, "__name__", ""))

    @property
    def inputs(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Float32Mode(TorchFunctionMode):
    """One cast serves all readers of a tensor, unless it is a leaf or was changed. A tensor that was
    moved is cast before that, which makes no difference to readers of the float32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}
        self.calls: dict[int, Call] = {}  # by the id of a result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args, kwargs
        rule = rule_of_name(operator_name(getattr(func, "__name__", "")))
        found = [t.dtype for t in pytree.tree_leaves((args, kwargs)) if _floats(t)]
        if rule is Rule.FLOAT32 and not names_dtype(args, kwargs):
            args, kwargs = self._in(torch.float32, (args, kwargs), only=NARROW)
        elif rule is Rule.NARROW:
            args, kwargs = self._in(torch.bfloat16, (args, kwargs), only=(torch.float32,))
        elif rule is Rule.EQUAL and found:
            args, kwargs = self._in(reduce(torch.promote_types, found), (args, kwargs))
        elif rule is Rule.TARGET:
            args = (args[0], *self._in(args[0].dtype, args[1:]))
        elif rule is Rule.SUM and self._is_residual(*args[:2]):
            args = (*self._in(torch.bfloat16, args[:2]), *args[2:])
        result = func(*args, **kwargs)
        known = {id(leaf) for leaf in pytree.tree_leaves(given)}
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor) and id(made) not in known:
                number = len(self.calls)
                self.calls[id(made)] = Call(number, func, *given, made, made._version)
        return result

    def _is_residual(self, x: Any, y: Any) -> bool:
        """Whether one is bfloat16 and the other a float32 function of it, with products."""
        both = {t.dtype: t for t in (x, y) if _floats(t) and t.dim()}
        if set(both) != {torch.bfloat16, torch.float32}:
            return False
        stream, branch = both[torch.bfloat16], both[torch.float32]
        since = self._number(stream)
        found, pending = {id(branch)}, [branch]
        products = 0
        while pending:
            call = self.calls.get(id(pending.pop()))
            if call is None or call.number <= since:
                continue
            products += rule_of_name(call.name) is Rule.NARROW
            new = {id(t): t for t in call.inputs if id(t) not in found}
            found |= set(new)
            pending.extend(new.values())
        return id(stream) in found and products > 0

    def _number(self, tensor: Tensor) -> int:
        call = self.calls.get(id(tensor))
        return -1 if call is None else call.number

    def _in(self, dtype: torch.dtype, arguments: Any, only: Any = None) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            if not _floats(tensor) or (only and tensor.dtype not in only):
                return tensor
            return self._cast(tensor, dtype)

        return pytree.tree_map_only(Tensor, cast, arguments)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype or tensor.is_leaf:
            return tensor.to(dtype)
        key = id(tensor), tensor._version, dtype
        if key not in self.casts:
            self.casts[key] = tensor, self._new_cast(tensor, dtype)
        return self.casts[key][1]

    def _new_cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        call = self.calls.get(id(tensor))
        if call is None or dtype not in NARROW or call.version != tensor._version:
            return tensor.to(dtype)
        if names_dtype(call.args) or not moves_by_name(call.name, num_tensors=len(call.inputs)):
            return tensor.to(dtype)
        args, kwargs = self._in(dtype, (call.args, call.kwargs))
        moved: Tensor = call.func(*args, **kwargs)
        return moved


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
