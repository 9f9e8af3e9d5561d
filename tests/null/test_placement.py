"""Which ranks share a node, for nodes of several shapes."""

from collections.abc import Sequence

import pytest

from piper.errors import RunError
from piper.mesh import Mesh
from piper.runtime.launch.ray.node_placement import assign, check_axes


def _mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes.items()))


def _bundles(rooms: Sequence[int]) -> list[str]:
    """Bundles whose nodes take turns, as far as they have room."""
    left = dict(enumerate(rooms))
    found = []
    while any(left.values()):
        for node in [n for n, room in left.items() if room]:
            found.append(f"node{node}")
            left[node] -= 1
    return found


def _nodes(mesh: Mesh, rooms: Sequence[int], **wish: str) -> list[str]:
    """Each rank's node."""
    nodes = _bundles(rooms)
    bundles = assign(mesh, nodes, **wish)
    assert sorted(bundles) == list(range(mesh.size))  # every bundle has one rank
    return [nodes[bundle] for bundle in bundles]


def _together(mesh: Mesh, axis: str, nodes: Sequence[str]) -> tuple[int, int]:
    """Neighbours along an axis: how many share a node, and how many there are."""
    found = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        if at[axis] + 1 < dict(mesh.axes)[axis]:
            found.append(nodes[rank] == nodes[mesh.rank(at | {axis: at[axis] + 1})])
    return sum(found), len(found)


def test_without_a_wish_consecutive_ranks_share_a_node() -> None:
    assert _nodes(_mesh(a=2, b=2), (2, 2)) == ["node0", "node0", "node1", "node1"]
    assert _nodes(_mesh(a=5), (2, 3)) == ["node1", "node1", "node1", "node0", "node0"]


@pytest.mark.parametrize(
    ("mesh", "rooms", "axis", "apart"),
    [
        (_mesh(a=2, b=2), (2, 2), "a", 0),
        (_mesh(a=2, b=2), (2, 2), "b", 0),
        (_mesh(a=2, b=2), (4,), "a", 0),
        (_mesh(a=2, b=4), (4, 2, 2), "a", 0),
        (_mesh(a=2, b=4), (3, 3, 2), "a", 1),  # two nodes with an odd place
        (_mesh(a=4, b=2), (4, 4), "a", 0),
        (_mesh(a=4, b=2), (6, 2), "a", 1),
        (_mesh(a=4), (1, 1, 1, 1), "a", 3),
        (_mesh(a=2, b=2, c=2), (4, 4), "b", 0),
    ],
)
def test_near_neighbours_share_a_node(
    mesh: Mesh, rooms: tuple[int, ...], axis: str, apart: int
) -> None:
    together, pairs = _together(mesh, axis, _nodes(mesh, rooms, near=axis))
    assert together == pairs - apart


@pytest.mark.parametrize(
    ("mesh", "rooms", "axis", "together"),
    [
        (_mesh(a=2, b=2), (2, 2), "a", 0),
        (_mesh(a=2, b=2), (2, 2), "b", 0),
        (_mesh(a=2, b=2), (4,), "a", 2),
        (_mesh(a=2, b=2), (3, 1), "a", 1),
        (_mesh(a=4, b=2), (4, 4), "a", 0),
        (_mesh(a=4), (2, 2), "a", 0),
        (_mesh(a=4), (2, 1, 1), "a", 0),
        (_mesh(a=5), (3, 2), "a", 0),
        (_mesh(a=2, b=3), (2, 2, 2), "a", 0),
        (_mesh(a=2, b=2, c=2), (2, 2, 2, 2), "c", 0),
    ],
)
def test_spread_neighbours_are_on_different_nodes(
    mesh: Mesh, rooms: tuple[int, ...], axis: str, together: int
) -> None:
    assert _together(mesh, axis, _nodes(mesh, rooms, spread=axis))[0] == together


def test_a_spread_axis_leaves_the_others_together() -> None:
    nodes = _nodes(_mesh(a=2, b=4), (4, 4), spread="a")
    assert _together(_mesh(a=2, b=4), "b", nodes) == (6, 6)


def test_both_wishes() -> None:
    mesh = _mesh(a=4, b=2)
    nodes = _nodes(mesh, (4, 4), near="b", spread="a")
    assert _together(mesh, "b", nodes) == (4, 4)
    assert _together(mesh, "a", nodes)[0] == 0


def test_wishes_about_no_axis_are_refused() -> None:
    with pytest.raises(RunError, match=r"near='aa' is no axis .*did you mean 'a'") as caught:
        check_axes(_mesh(a=2, b=2), near="aa", spread=None)
    assert caught.value.legal == "a, b"
    with pytest.raises(RunError, match="spread='a' is no axis"):
        check_axes(None, near=None, spread="a")
    with pytest.raises(RunError, match="both 'a'"):
        check_axes(_mesh(a=2), near="a", spread="a")
