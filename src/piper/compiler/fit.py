"""fit: the logical graph and the program at one rank's size in; the graph with types that fit it out."""

from __future__ import annotations

import msgspec

from piper.errors import PlanError
from piper.frontend.build import SEED
from piper.frontend.traced import Traced
from piper.ir.graph import Graph
from piper.ir.layouts import (
    PARTIAL,
    REPLICATED,
    SHARED,
    STACKED,
    Layout,
    Routed,
    Split,
    dual,
    local,
    whole_type,
)
from piper.ir.routing import counts_of
from piper.ir.tensor_type import TensorType
from piper.ir.values import GIVEN, Role, Value, made_along, read_along

_OF_MODEL = ("param", "buffer", "param_grad")  # whole in the program, however they are laid out
_ALONG_BATCH: dict[Role, Layout] = {
    "param": REPLICATED,
    "buffer": REPLICATED,
    "param_grad": PARTIAL,
    "batch": Split(0),
    "key": STACKED,
    "statistic": STACKED,
    "loss": PARTIAL,
    "count": PARTIAL,
    "metric": PARTIAL,
    "constant": SHARED,
    "coordinate": SHARED,
    "saved": REPLICATED,
}


def fit_types(logical: Graph, whole: Traced, part: Traced) -> Graph:
    """Every Value's type, cut as its layout says, is what one rank's program, `part`, has.

    A Value that each microbatch has for itself, without rows, may still depend on their number, such as
    a matrix of similarities: until now it has the type of the `whole` batch's program. Blocks in which
    rows are cut along axes that share tensors depend on their number, too.
    """
    logical = _with_blocks(logical, part)
    _check_layouts(logical)
    changed: dict[str, Value] = {}
    for name, value in logical.values.items():
        have = _spec(logical, value, part)
        type = value.type
        if value.batch == STACKED:
            type = local(type, value.cut, logical.mesh)
            if type == _spec(logical, value, whole) and type != have:
                type = have
                own = whole_type(have, value.cut, dict(logical.mesh.axes))
                changed[name] = msgspec.structs.replace(value, type=own)
        elif value.role not in _OF_MODEL:
            type = local(type, value.layout, logical.mesh)
        if (type.shape, type.dtype) != (have.shape, have.dtype):
            raise PlanError(f"{name} is {type} by the graph, but {have} in one rank's program")
    return logical.replacing({}, changed) if changed else logical


def _with_blocks(logical: Graph, part: Traced) -> Graph:
    """Every Value cut as it is in one rank's program."""
    changed: dict[str, Value] = {}
    for name, value in logical.values.items():
        own = value.role not in ("saved", "grad", "param_grad") and value.name != SEED
        cut = part.values[_base(name)].cut if own else ()
        if value.role == "grad":
            cut = tuple((a, dual(way)) for a, way in part.values[_base(value.of)].cut)
        if cut and cut != value.cut:
            layout = tuple(
                (axis, way if isinstance(way, Routed) else dict(cut).get(axis, way))
                for axis, way in value.layout
            )
            changed[name] = msgspec.structs.replace(value, cut=cut, layout=layout)
    return logical.replacing({}, changed) if changed else logical


def _base(name: str) -> str:
    return name.partition("[")[0]


def _spec(logical: Graph, value: Value, traced: Traced) -> TensorType:
    """A gradient is like what it belongs to; what a body saves is no tensor of its own."""
    if value.role == "saved":
        return TensorType()
    if value.role == "constant":
        return TensorType((), traced.values[traced.loss].spec.dtype)
    owner = logical.values[value.of] if value.role in ("grad", "param_grad") else value
    return traced.values[_base(owner.name)].spec


def _check_layouts(logical: Graph) -> None:
    """Layouts are those that the owners of axes have given, and that roles have along the batch."""
    for value in logical.values.values():
        along = _ALONG_BATCH.get(value.role)
        if value.role == "grad":
            along = dual(read_along(logical.values[value.of], "", "batch", ""))
        if along is not None and value.batch != along:
            raise PlanError(
                f"{value.name} is {value.batch} along the batch, where a {value.role} is {along}"
            )
        if value.role == "saved" and value.layout:
            raise PlanError(f"{value.name} has a layout, but stands for what a body saves")
    for node in logical.chunks:
        values = logical.values
        given = [name for name in node.inputs if values[name].role in GIVEN or values[name].source]
        shares = {owner.axis: owner.shares for owner in node.owners}
        counts = counts_of(logical, node) if "experts" in shares.values() else ""
        for name in (*node.outputs, *given):
            value = logical.values[name]
            for axis, layout in value.layout:
                if axis not in shares or layout != made_along(value, axis, shares[axis], counts):
                    raise PlanError(f"{name} is {layout} along {axis}, but not for {node.name}")
            if len(value.layout) != len(shares) and value.role != "saved":
                raise PlanError(f"{name} has no layout along all axes of {node.name}")
