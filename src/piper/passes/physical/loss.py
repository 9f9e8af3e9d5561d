"""loss: summed over microbatches and data ranks, and known on every rank; the divisor of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from piper.ir.layouts import REPLICATED
from piper.ir.nodes import TRACED, Accumulate, Chunk
from piper.ir.tensor_type import TensorType, accumulation_dtype
from piper.ir.values import Value
from piper.mesh import Slice
from piper.passes.physical.draft import Draft, at_slice
from piper.passes.physical.relayout import Way, collective, laid

STREAM = "scalars"


@dataclass(frozen=True)
class Divisor:
    """What gradients are divided by: a constant, or a Value on each slice."""

    count: float | None = None
    values: dict[Slice, str] = field(default_factory=dict)


def report_loss(draft: Draft, slices: list[Slice], data_axes: tuple[str, ...]) -> Divisor:
    """Add the sums of loss and count over everything; returns what to divide gradients by.

    A mean loss counts 1 per microbatch, so the divisor is a constant; for (sum, count) one all_reduce
    of the counts feeds every Update.
    """
    logical = draft.logical
    _total(draft, "loss", slices)
    for name in logical.metrics:
        _total(draft, "metric", slices, name)
    if not logical.count:
        num_data_ranks = logical.mesh.size_of(data_axes)
        return Divisor(count=float(num_data_ranks * logical.num_microbatches))
    return Divisor(values=_total(draft, "count", slices))


def _total(draft: Draft, role: str, slices: list[Slice], of: str = "") -> dict[Slice, str]:
    """Sum all Values of a role, of metrics those of one; the total stands on every slice as `loss@...`,
    `count@...` or `metric.NAME@...`."""
    what = f"{role}.{of}" if of else role
    summing: set[Slice] = set()
    for node in list(draft.nodes.values()):
        if not isinstance(node, Chunk) or node.phase != "F":
            continue
        for name in node.outputs:
            value = draft.values[name]
            if value.role == role and value.of == of and node.slice is not None:
                summing.add(node.slice)
                _add(draft, node, value, what)
    terms = {at: at_slice(f"$sum.{what}", at) for at in slices}
    return total_of(draft, terms, role, f"${what}", like=draft.values[terms[min(summing)]])


def total_of(
    draft: Draft, terms: dict[Slice, str], role: str, name: str, *, like: Value
) -> dict[Slice, str]:
    """Per slice, the sum of a number over all ranks of all slices. A slice whose term does not exist has
    zero; all terms are `like` one."""
    totals = {}
    for at, term in terms.items():
        if term not in draft.values:
            zero = at_slice(f"$zero.{name.removeprefix('$')}", at)
            term = draft.like(like, zero, at, role="constant", of="0")
        layout = laid(like.layout, tuple(axis for axis, _ in like.layout), REPLICATED)
        total = msgspec.structs.replace(
            like, name=at_slice(name, at), role=role, layout=layout, slice=at, of=""
        )
        key = f"total.{name.removeprefix('$')}"
        way = Way(at_slice(key, at), at, STREAM, TRACED, key=key, slices=tuple(sorted(terms)))
        comm = collective(draft.logical.mesh, draft.values[term], total, way)
        if comm is None:
            return terms
        totals[at] = draft.value(total)
        draft.node(comm)
    return totals


def _add(draft: Draft, node: Chunk, value: Value, what: str) -> None:
    dtype = "float64" if value.role == "count" else accumulation_dtype(value.dtype)
    name = at_slice(f"$sum.{what}", node.slice)
    # What a microbatch contributes has the layout of the loss, count or metric that it made.
    type = TensorType(value.shape, dtype)
    total = draft.value(
        Value(name, "sum", type, value.layout, of=what, slice=node.slice, cut=value.cut)
    )
    draft.node(
        Accumulate(
            name=f"add>{value.name}",
            tags=node.tags,
            inputs=(value.name,),
            outputs=(total,),
            slice=node.slice,
        )
    )
