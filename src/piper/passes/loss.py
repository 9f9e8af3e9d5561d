"""loss: summed over microbatches and data ranks, and known on every rank; the divisor of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from piper.ir.nodes import Accumulate, Chunk, Comm
from piper.ir.values import Value, accumulation_dtype
from piper.mesh import Group, Slice
from piper.passes.draft import Draft, at_slice

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
    _total(draft, "loss", slices, data_axes)
    if not logical.count:
        num_data_ranks = logical.mesh.size_of(data_axes)
        return Divisor(count=float(num_data_ranks * logical.num_microbatches))
    return Divisor(values=_total(draft, "count", slices, data_axes))


def _total(
    draft: Draft, role: str, slices: list[Slice], data_axes: tuple[str, ...]
) -> dict[Slice, str]:
    """Sum all Values of a role; the total stands on every slice as `loss@...` or `count@...`."""
    summing: set[Slice] = set()
    for node in list(draft.nodes.values()):
        if not isinstance(node, Chunk) or node.phase != "F":
            continue
        for name in node.outputs:
            value = draft.values[name]
            if value.role == role and node.slice is not None:
                summing.add(node.slice)
                _add(draft, node, value, role)
    group = Group(tuple(sorted(slices)), data_axes)
    if group.size(draft.logical.mesh) == 1:
        return {at: at_slice(f"$sum.{role}", at) for at in slices}
    dtype = next(v.dtype for v in draft.values.values() if v.name.startswith(f"$sum.{role}@"))
    totals = {}
    for at in slices:
        mine = at_slice(f"$sum.{role}", at)
        if at not in summing:
            mine = draft.value(
                Value(at_slice(f"$zero.{role}", at), "constant", (), dtype, of="0", slice=at)
            )
        totals[at] = draft.value(Value(at_slice(f"${role}", at), role, (), dtype, slice=at))  # type: ignore[arg-type]
        draft.node(
            Comm(
                name=f"total.{role}@{at}",
                inputs=(mine,),
                outputs=(totals[at],),
                slice=at,
                stream=STREAM,
                comm="all_reduce",
                group=group,
                key=f"total.{role}",
            )
        )
    return totals


def _add(draft: Draft, node: Chunk, value: Value, role: str) -> None:
    dtype = "float64" if role == "count" else accumulation_dtype(value.dtype)
    name = at_slice(f"$sum.{role}", node.slice)
    total = draft.value(Value(name, "sum", (), dtype, of=role, slice=node.slice))
    draft.node(
        Accumulate(
            name=f"add>{value.name}",
            tags=node.tags,
            inputs=(value.name,),
            outputs=(total,),
            slice=node.slice,
        )
    )
