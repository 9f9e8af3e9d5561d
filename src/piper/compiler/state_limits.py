"""Limits of state: a strategy under which one device's order of changes to buffers cannot be kept, or
statistics would be of too few samples, is refused, with the directive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.errors import AxisError, Call, PlaceError
from piper.frontend.traced import Traced
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk


def check_state(logical: Graph, traced: Traced, calls: Sequence[Call]) -> None:
    """Raise where data ranks would need each other's buffers, or several slices change one."""
    sizes = dict(logical.mesh.axes)
    if traced.synced:
        _refuse_synced(logical, sizes, traced.synced, calls)
    if not traced.changed:
        return
    homes: dict[int, Chunk] = {}
    for node in logical.chunks:
        changed = [name for name in node.inputs if name in traced.changed]
        if node.phase != "F" or not changed:
            continue
        first = homes.setdefault(node.chunk, node)
        if first.slice != node.slice:
            raise PlaceError(
                f"buffer {changed[0]} is changed by {first.name} on {first.slice} and by "
                f"{node.name} on {node.slice}",
                call=calls[node.origin] if node.origin >= 0 else None,
                legal="all microbatches of a stage with state on one slice",
            )
        carried = [name for name in changed if name in traced.carried]
        for owner in node.owners:
            if sizes[owner.axis] == 1:
                continue
            if owner.shares == "experts":
                raise AxisError(
                    f"buffer {changed[0]} is changed by experts, which {owner.axis} shares out",
                    call=calls[owner.origin],
                    legal="experts without state that forward changes",
                )
            if carried:
                raise AxisError(
                    f"a forward reads buffer {carried[0]} and changes it for the next one "
                    f"({traced.carried[carried[0]]}): ranks along {owner.axis} cannot run at once",
                    call=calls[owner.origin],
                    legal="state that forward changes and does not read, as running statistics are; "
                    "or one data rank",
                )


def _refuse_synced(
    logical: Graph, sizes: Mapping[str, int], line: str, calls: Sequence[Call]
) -> None:
    for owner in (owner for node in logical.chunks for owner in node.owners):
        if owner.shares in ("batch", "experts") and sizes[owner.axis] > 1:
            raise AxisError(
                f"SyncBatchNorm ({line}) has statistics of all ranks along {owner.axis}, which is "
                "not supported yet",
                call=calls[owner.origin],
                legal="nn.BatchNorm2d, with statistics of each microbatch; nn.GroupNorm, which needs "
                "none; or one data rank",
            )
