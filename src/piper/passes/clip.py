"""clip: the norm of all gradients, known on every slice before, or after, Updates use it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.nodes import Comm, Norm, Settle
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
    group = Group(tuple(sorted(slices)), data_axes)
    norms = {}
    for at in slices:
        mine = [(n, name) for (n, here), name in gradients.items() if here == at]
        local = draft.value(Value(at_slice("$squares", at), "activation", (), "float64", slice=at))
        draft.node(
            Norm(
                name=at_slice("norm", at),
                inputs=tuple(name for _, name in mine),
                outputs=(local,),
                slice=at,
                weights=tuple(_weight(draft, bucketed.buckets[n]) for n, _ in mine),
            )
        )
        norms[at] = local
        if group.size(draft.logical.mesh) > 1:
            norms[at] = draft.value(
                Value(at_slice("$norm", at), "activation", (), "float64", slice=at)
            )
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
