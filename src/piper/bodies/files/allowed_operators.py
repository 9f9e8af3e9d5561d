"""Operators by name: the name of an operator in a body in, the function that it calls out; or refused.

A body is data: it may call what computes tensors and numbers, and nothing else. A name is looked up in
torch's dispatcher or in the table below, never as an attribute.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from piper.errors import PlanError

_NAME = re.compile(r"([A-Za-z_]\w*)\.(\w+)\.(\w+)", re.ASCII)
# Libraries that torch registers for its own compilers and transports. Some of their operators read
# files, or memory without a look at its bounds. All other libraries are the user's.
_INSIDE_TORCH = {
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized",
    "_test", "c10d", "debug_mode_ops", "debugprims", "export", "higher_order", "inductor",
    "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prepacked", "prim",
    "profiler", "quantization", "quantized", "rngprims", "sparse", "static_runtime", "symm_mem",
}  # fmt: skip
_OF_FILES = {"file", "filename", "path", "url"}  # arguments of operators that open files

_SYMBOLIC = ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum")
_ARITHMETIC = (
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lt", "mod", "mul", "ne",
    "neg", "not_", "or_", "pos", "pow", "sub", "truediv",
)  # fmt: skip
# Functions of Python that captured code calls: items of results, and numbers of rows.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"_operator:{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"math:{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{f"torch:{name}": getattr(torch, name) for name in _SYMBOLIC},
    "torch.random:manual_seed": torch.random.manual_seed,
}


def operator_name(target: Any) -> str | None:
    """The name under which a body may call an operator; None if it may not."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name if _overload(name) is target else None
    name = f"{getattr(target, '__module__', '')}:{getattr(target, '__name__', '')}"
    return name if name in FUNCTIONS else None


@lru_cache(maxsize=4096)
def operator_of(name: str) -> Callable[..., Any]:
    """The operator of a name in a body."""
    function = FUNCTIONS.get(name) or _overload(name)
    if function is not None:
        return function
    known = _NAME.fullmatch(name)
    if known and known[1] not in _INSIDE_TORCH and not _registered(known):
        raise PlanError(
            f"this process has no operator {name}",
            legal="import the module that registers it before the plan is loaded",
        )
    raise PlanError(
        f"a body may not call {name[:80]!r}",
        legal="operators of aten, prims and libraries that this process has registered",
    )


def _overload(name: str) -> Any:
    """The registered operator of a name, if bodies may call it."""
    known = _NAME.fullmatch(name)
    if not known or known[1] in _INSIDE_TORCH or not _registered(known):
        return None
    overload = getattr(getattr(getattr(torch.ops, known[1]), known[2]), known[3])
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    opens_file = any(
        argument.name in _OF_FILES and "str" in str(argument.type)
        for argument in overload._schema.arguments
    )
    return None if opens_file else overload


def _registered(name: re.Match[str]) -> bool:
    """Whether the dispatcher has an operator; torch.ops has others, some of which write files."""
    overload = "" if name[3] == "default" else f".{name[3]}"
    try:
        return torch._C._dispatch_has_kernel(f"{name[1]}::{name[2]}{overload}")
    except RuntimeError:  # no operator could have such a name
        return False
