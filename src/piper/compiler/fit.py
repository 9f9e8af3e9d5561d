"""fit: the logical graph and the program at one rank's size in; the graph with types that fit it out."""

from __future__ import annotations

import msgspec

from piper.errors import PlanError
from piper.frontend.traced import Traced
from piper.ir.graph import Graph
from piper.ir.layouts import STACKED, local
from piper.ir.tensor_type import TensorType
from piper.ir.values import Value

_NO_TENSOR = ("saved", "constant")
_OF_MODEL = ("param", "buffer", "param_grad")  # whole in the program, however they are laid out


def fit_types(logical: Graph, traced: Traced) -> Graph:
    """Every Value's type, cut as its layout says, is what one rank's program has.

    A Value that each microbatch has for itself, without rows, may still depend on their number, such as
    a matrix of similarities: its type is known only now.
    """
    changed: dict[str, Value] = {}
    for name, value in logical.values.items():
        if value.role in _NO_TENSOR:
            continue
        have = _spec(logical, value, traced)
        if value.batch == STACKED:
            if value.type != have:
                changed[name] = msgspec.structs.replace(value, type=have)
            continue
        type = value.type
        if value.role not in _OF_MODEL:
            type = local(type, value.layout, logical.mesh)
        if (type.shape, type.dtype) != (have.shape, have.dtype):
            raise PlanError(f"{name} is {type} by the graph, but {have} in one rank's program")
    return logical.replacing({}, changed) if changed else logical


def _spec(logical: Graph, value: Value, traced: Traced) -> TensorType:
    """A gradient is like what it belongs to."""
    owner = logical.values[value.of] if value.role in ("grad", "param_grad") else value
    return traced.values[owner.name.partition("[")[0]].spec
