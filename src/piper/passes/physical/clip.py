"""clip: the norm of all gradients, known on every slice before, or after, Updates use it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.layouts import PARTIAL
from piper.ir.nodes import Accumulate, Norm, Settle
from piper.ir.tensor_type import TensorType
from piper.ir.values import Value
from piper.mesh import Group, Slice
from piper.passes.physical.buckets import Bucketed
from piper.passes.physical.draft import Draft, at_slice
from piper.passes.physical.loss import Divisor, total_of
from piper.passes.physical.relayout import laid
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
    largest: float,
    late: bool,
) -> Clip:
    """Sum the squares of all gradients over everything; each parameter counts once."""
    for (number, at), name in gradients.items():
        _add_squares(draft, bucketed.buckets[number], at, name)
    terms = {at: at_slice("$squares", at) for at in slices}
    like = next(draft.values[term] for term in terms.values() if term in draft.values)
    return Clip(largest, late, total_of(draft, terms, "activation", "$norm", like=like))


def _add_squares(draft: Draft, bucket: Bucket, at: Slice, gradient: str) -> None:
    """The squares of one bucket's gradient, added to those of its slice."""
    mine = at_slice(f"$squares.{bucket.name}", at)
    # Squares of parts add up; those of copies do once each is weighed by their number.
    axes = draft.values[gradient].layout
    layout = laid(axes, tuple(axis for axis, _ in axes), PARTIAL)
    square = TensorType((), "float64")
    draft.value(Value(mine, "activation", square, layout, slice=at))
    total = draft.value(Value(at_slice("$squares", at), "sum", square, layout, slice=at))
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
    axes = (*bucket.copies, *bucket.same)
    return 1.0 / Group(bucket.slices, axes).size(draft.logical.mesh)


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
