"""gradients: contributions summed over microbatches, reduced over copies, and given to Updates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from piper.ir.nodes import Accumulate, Chunk, Comm, Update
from piper.ir.values import Value, accumulation_dtype
from piper.mesh import Group, Slice
from piper.passes.draft import Draft, at_slice
from piper.passes.loss import Divisor


@dataclass
class _Parameter:
    """Where a parameter lives, along which axes its gradient is partial, who asked for that."""

    slices: list[Slice] = field(default_factory=list)
    over: tuple[str, ...] = ()
    stream: str = ""
    origin: int = -1
    contributing: set[Slice] = field(default_factory=set)


def update_parameters(draft: Draft, divisor: Divisor) -> None:
    """Add the Accumulates, the all_reduces and the Updates of all parameters that get a gradient."""
    params = _parameters(draft)
    for node in list(draft.nodes.values()):
        if isinstance(node, Chunk) and node.phase == "B":
            _accumulate(draft, node)
    bundles: dict[tuple[tuple[Slice, ...], tuple[str, ...], str, int], list[str]] = defaultdict(
        list
    )
    for name, param in params.items():
        if param.contributing:
            slices = tuple(sorted(param.slices))
            bundles[slices, param.over, param.stream, param.origin].append(name)
    for number, ((slices, over, stream, origin), names) in enumerate(bundles.items()):
        group = Group(slices, over)
        for at in slices:
            grads = [_gradient(draft, name, at, params[name]) for name in names]
            if group.size(draft.logical.mesh) > 1:
                grads = _reduce(draft, grads, group, at, number, stream, origin)
            own = tuple(at_slice(name, at) for name in names)
            draft.node(
                Update(
                    name=f"update{number}@{at}",
                    inputs=(*grads, *((divisor.values[at],) if divisor.values else ())),
                    slice=at,
                    origin=origin,
                    params=own,
                    count=divisor.count,
                )
            )


def _parameters(draft: Draft) -> dict[str, _Parameter]:
    """All parameters by their name in the model."""
    found: dict[str, _Parameter] = defaultdict(_Parameter)
    for node in draft.logical.chunks:
        assert node.slice is not None
        names = [*node.inputs, *node.outputs]
        for name in names:
            value = draft.logical.values[name]
            if value.role not in ("param", "param_grad"):
                continue
            param = found[value.of if value.role == "param_grad" else name]
            if node.slice not in param.slices:
                param.slices.append(node.slice)
            partial = [o for o in node.owners if o.how == "replicate"]
            mesh = draft.logical.mesh
            param.over = tuple(
                a for a in mesh.names if a in {o.axis for o in partial} and mesh.size_of((a,)) > 1
            )
            param.stream = partial[0].stream if partial else "reduce"
            param.origin = partial[0].origin if partial else node.origin
            if value.role == "param_grad":
                param.contributing.add(node.slice)
    return found


def _accumulate(draft: Draft, node: Chunk) -> None:
    names = [name for name in node.outputs if draft.values[name].role == "param_grad"]
    if not names:
        return
    sums = []
    for name in names:
        value = draft.values[name]
        assert node.slice is not None
        sums.append(draft.value(_sum_value(value, node.slice)))
    draft.node(
        Accumulate(
            name=f"add>{node.name}",
            tags=node.tags,
            inputs=tuple(names),
            outputs=tuple(sums),
            slice=node.slice,
            origin=node.origin,
        )
    )


def _sum_value(grad: Value, at: Slice) -> Value:
    name = at_slice(f"$grad.{grad.of}", at)
    dtype = accumulation_dtype(grad.dtype)
    return Value(name, "sum", grad.shape, dtype, grad.layout, of=at_slice(grad.of, at), slice=at)


def _gradient(draft: Draft, name: str, at: Slice, param: _Parameter) -> str:
    """The sum of a parameter's gradient on a slice; zeros where nothing contributes."""
    if at in param.contributing:
        return at_slice(f"$grad.{name}", at)
    like = draft.values[at_slice(name, at)]
    zeros = draft.like(like, at_slice(f"$zeros.{name}", at), at, role="constant", of="0")
    total = draft.value(_sum_value(msgspec.structs.replace(like, role="param_grad", of=name), at))
    # The sum starts from zeros every step, since it is reduced in place.
    draft.node(Accumulate(name=f"add>{zeros}", inputs=(zeros,), outputs=(total,), slice=at))
    return total


def _reduce(
    draft: Draft, grads: list[str], group: Group, at: Slice, number: int, stream: str, origin: int
) -> list[str]:
    reduced = [
        draft.like(draft.values[name], f"{name}~reduced", at, role="param_grad") for name in grads
    ]
    draft.node(
        Comm(
            name=f"reduce{number}@{at}",
            inputs=tuple(grads),
            outputs=tuple(reduced),
            slice=at,
            stream=stream,
            origin=origin,
            comm="all_reduce",
            group=group,
            key=f"reduce{number}",
            in_place=True,
        )
    )
    return reduced
