"""Meshes: ranks, slices and groups."""

import pytest

from piper.errors import MeshError
from piper.mesh import Group, Mesh, Slice

MESH = Mesh((("pp", 2), ("dp", 2), ("ep", 2)))


def test_ranks_are_numbered_row_major() -> None:
    assert [MESH.coordinates(5)[axis] for axis in MESH.names] == [1, 0, 1]
    assert all(MESH.rank(MESH.coordinates(rank)) == rank for rank in range(MESH.size))
    assert list(MESH.ranks(MESH.at(pp=1))) == [4, 5, 6, 7]
    assert list(MESH.ranks(Slice())) == list(range(8))


def test_groups_differ_only_along_their_axes() -> None:
    assert Group((MESH.at(pp=1),), ("ep",)).ranks(MESH, 6) == (6, 7)
    assert Group((MESH.at(pp=0), MESH.at(pp=1)), ()).ranks(MESH, 6) == (2, 6)
    assert Group((MESH.at(pp=0), MESH.at(pp=1)), ("dp", "ep")).ranks(MESH, 3) == tuple(range(8))


def test_a_slice_outside_the_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="did you mean 'pp'"):
        MESH.at(p=0)
    with pytest.raises(MeshError, match="pp from 0 to 1"):
        MESH.at(pp=2)
