"""Placement: which ranks share a node, by a wish about one axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from piper.errors import RunError, did_you_mean
from piper.mesh import Mesh


def check_axes(mesh: Mesh | None, *, near: str | None, spread: str | None) -> None:
    """Refuse wishes about axes that the mesh does not have."""
    names = mesh.names if mesh is not None else ()
    for word, axis in (("near", near), ("spread", spread)):
        if axis is not None and axis not in names:
            raise RunError(
                f"{word}={axis!r} is no axis of the mesh{did_you_mean(axis, names)}",
                legal=", ".join(names) or "no axes: give the pool mesh=...",
            )
    if near is not None and near == spread:
        raise RunError(f"near and spread are both {near!r}", legal="two axes, or one of them")


def assign(
    mesh: Mesh, nodes: Sequence[str], *, near: str | None = None, spread: str | None = None
) -> list[int]:
    """The bundle of each rank, given each bundle's node.

    Ranks that differ only along `near` share a node as far as they fit; neighbours along `spread` are
    on different nodes as far as there are any. Without a wish, consecutive ranks share a node.
    """
    free = Counter(nodes)
    where: dict[int, str] = {}
    last = ""
    for block in _blocks(mesh, near, spread):
        mates = [_along(mesh, spread, rank) for rank in block]
        while block:
            costs = {
                node: (
                    room < len(block),
                    sum(where.get(r) == node for near_by, _ in mates for r in near_by),
                    sum(where.get(r) == node for _, line in mates for r in line),
                    node != last,
                    room if spread is None and room >= len(block) else -room,
                )
                for node, room in free.items()
            }
            last = min(costs, key=costs.__getitem__)
            taken, block = block[: free[last]], block[free[last] :]
            where |= dict.fromkeys(taken, last)
            free -= Counter({last: len(taken)})  # keeps only those with room
    bundles: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        bundles.setdefault(node, []).append(bundle)
    return [bundles[where[rank]].pop(0) for rank in range(mesh.size)]


def _blocks(mesh: Mesh, near: str | None, spread: str | None) -> list[list[int]]:
    """Ranks that go to one node if it has room, in the order in which they are placed."""
    if near is None and spread is None:
        return [list(range(mesh.size))]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        others = tuple(index for axis, index in at.items() if axis != near)
        found.setdefault((at[spread] if spread else 0, *others), []).append(rank)
    return [found[key] for key in sorted(found)]


def _along(mesh: Mesh, axis: str | None, rank: int) -> tuple[list[int], list[int]]:
    """The neighbours of a rank along an axis, and all ranks of that line."""
    if axis is None:
        return [], []
    at = mesh.coordinates(rank)
    line = [mesh.rank(at | {axis: index}) for index in range(dict(mesh.axes)[axis])]
    here = at[axis]
    return line[max(here - 1, 0) : here] + line[here + 1 : here + 2], line
