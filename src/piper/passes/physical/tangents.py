"""tangents: several contributions to one gradient, added where they arise before they travel."""

from __future__ import annotations

from piper.errors import PlanError
from piper.ir.nodes import Accumulate, Chunk
from piper.mesh import Slice
from piper.passes.physical.draft import Draft, at_slice


def sum_tangent(draft: Draft, node: Chunk, output: str, contributions: list[str]) -> str:
    """The Value that holds the gradient of `output` for the backward `node`."""
    if len(contributions) == 1:
        return contributions[0]
    by_slice: dict[Slice | None, list[str]] = {}
    for name in contributions:
        by_slice.setdefault(draft.values[name].slice, []).append(name)
    if not contributions:
        raise PlanError(f"malformed graph: no gradient reaches {output}", details=[node.name])
    parts = []
    for at, names in by_slice.items():
        if at != node.slice and len(names) > 1:
            parts.append(_add(draft, node, output, names, at))
        else:
            parts += names
    return _add(draft, node, output, parts, node.slice) if len(parts) > 1 else parts[0]


def _add(draft: Draft, node: Chunk, output: str, names: list[str], at: Slice | None) -> str:
    total = draft.like(
        draft.values[names[0]], at_slice(f"$d.{output}", at), at, role="sum", of=output
    )
    for index, name in enumerate(names):
        draft.node(
            Accumulate(
                name=f"add{index}>{total}",
                tags=node.tags,
                inputs=(name,),
                outputs=(total,),
                slice=at,
                origin=node.origin,
            )
        )
    return total
