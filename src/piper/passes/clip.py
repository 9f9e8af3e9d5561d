"""clip: the norm of all gradients, known on every slice before, or after, Updates use it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.nodes import Accumulate, Comm, Norm, Settle
from piper.ir.values import Value
from piper.mesh import Group, Slice
from piper.passes.buckets import Bucketed
from piper.passes.draft import Draft, at_slice
from piper.passes.loss import STREAM, Divisor
from piper.plan.types import Bucket


@dataclass(frozen=True)
class Clip:
    """The largest norm that gradients may have, and per slice the Value that holds their square sum."""

    largest: float
    late: bool
    norms: dict[Slice, str]


def measure_norm(
    draft: Draft,
    bucketed: Bucketed,
    gradients: dict[tuple[int, Slice], str],
    *,
    slices: list[Slice],
    data_axes: tuple[str, ...],
    largest: float,
    late: bool,
) -> Clip:
    """Sum the squares of all gradients over everything; each parameter counts once."""
    for (number, at), name in gradients.items():
        _add_squares(draft, bucketed.buckets[number], at, name)
    group = Group(tuple(sorted(slices)), data_axes)
    norms = {at: at_slice("$squares", at) for at in slices}
    if group.size(draft.logical.mesh) > 1:
        for at, local in norms.items():
            norms[at] = draft.value(
                Value(at_slice("$norm", at), "activation", (), "float64", slice=at)
            )
            if local not in draft.values:
                zero = at_slice("$zero.squares", at)
                local = draft.value(Value(zero, "constant", (), "float64", of="0", slice=at))
            draft.node(
                Comm(
                    name=at_slice("total.norm", at),
                    inputs=(local,),
                    outputs=(norms[at],),
                    slice=at,
                    stream=STREAM,
                    comm="all_reduce",
                    group=group,
                    key="total.norm",
                )
            )
    return Clip(largest, late, norms)


def _add_squares(draft: Draft, bucket: Bucket, at: Slice, gradient: str) -> None:
    """The squares of one bucket's gradient, added to those of its slice."""
    mine = at_slice(f"$squares.{bucket.name}", at)
    draft.value(Value(mine, "activation", (), "float64", slice=at))
    total = draft.value(Value(at_slice("$squares", at), "sum", (), "float64", slice=at))
    draft.node(
        Norm(
            name=at_slice(f"norm.{bucket.name}", at),
            inputs=(gradient,),
            outputs=(mine,),
            slice=at,
            weights=(_weight(draft, bucket),),
        )
    )
    draft.node(Accumulate(name=f"add>{mine}", inputs=(mine,), outputs=(total,), slice=at))


def _weight(draft: Draft, bucket: Bucket) -> float:
    """One over the number of ranks that hold the same gradient."""
    return 1.0 / Group(bucket.slices, bucket.copies).size(draft.logical.mesh)


def settle(
    draft: Draft,
    number: int,
    bucket: Bucket,
    at: Slice,
    stepped: tuple[str, ...],
    clip: Clip,
    divisor: Divisor,
) -> tuple[str, ...]:
    """Undo and repeat a late Update where the norm turns out too large."""
    settled = tuple(
        draft.like(draft.values[name], f"{name}~settled", at, place=draft.values[name].place)
        for name in stepped
    )
    draft.node(
        Settle(
            name=at_slice(f"settle.{bucket.name}", at),
            inputs=(*stepped, *((divisor.values[at],) if divisor.values else ()), clip.norms[at]),
            outputs=settled,
            slice=at,
            bucket=number,
            count=divisor.count,
            clip=clip.largest,
        )
    )
    return settled
