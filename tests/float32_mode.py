"""Float32Mode: eager code under it computes in float32 where `lower(precision="bf16")` does.

It has the table of operators in common with Piper, and nothing else: each call is seen by torch's own
protocol while it runs, where Piper puts casts into a captured graph.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from piper.bodies.operator_dtypes import Rule, names_dtype, operator_name, rule_of_name

NARROW = (torch.float16, torch.bfloat16)


class Float32Mode(TorchFunctionMode):
    """One cast serves all readers of a tensor, unless it is a leaf or was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[Any, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        return func(*args, **kwargs)

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
            self.casts[key] = tensor, tensor.to(dtype)
        return self.casts[key][1]


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
