"""Named grids of devices: names and sizes of axes in, ranks, slices and groups out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from piper.errors import Call, MeshError, did_you_mean, user_source

MAX_RANKS = 1 << 20


class Slice(msgspec.Struct, frozen=True, order=True):
    """The ranks of a mesh whose coordinates on some axes are fixed; no fixed axis: all ranks."""

    fixed: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{axis}={at}" for axis, at in self.fixed) or "*"

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.fixed)

    def inside(self, mesh: Mesh) -> bool:
        """Whether it fixes different axes of a mesh, each at a coordinate that exists."""
        sizes = dict(mesh.axes)
        known = all(axis in sizes and 0 <= at < sizes[axis] for axis, at in self.fixed)
        return known and len(self.axes) == len(self.fixed)


class Mesh(msgspec.Struct, frozen=True):
    """Axes with sizes, in order; ranks are numbered row-major (the last axis varies fastest)."""

    axes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.axes) or "(one device)"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.axes)

    @property
    def size(self) -> int:
        total = 1
        for _, n in self.axes:
            total *= n
        return total

    def size_of(self, axes: tuple[str, ...]) -> int:
        total = 1
        for axis in axes:
            total *= dict(self.axes)[axis]
        return total

    def at(self, **coordinates: int) -> Slice:
        """The slice at these coordinates: `mesh.at(pp=0)`."""
        sizes = dict(self.axes)
        for axis, at in coordinates.items():
            if axis not in sizes:
                raise MeshError(
                    f"the mesh has no axis {axis!r}{did_you_mean(axis, self.names)}",
                    call=Call("mesh.at", user_source()),
                    legal=f"axes {', '.join(self.names) or '(none)'}",
                )
            if not 0 <= at < sizes[axis]:
                raise MeshError(
                    f"{axis}={at} is outside the mesh",
                    call=Call("mesh.at", user_source()),
                    legal=f"{axis} from 0 to {sizes[axis] - 1}",
                )
        return Slice(tuple((a, coordinates[a]) for a in self.names if a in coordinates))

    def coordinates(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for axis, size in reversed(self.axes):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for axis, size in self.axes:
            rank = rank * size + coordinates[axis]
        return rank

    def ranks(self, at: Slice) -> Iterator[int]:
        fixed = dict(at.fixed)
        found = [0]
        for axis, size in self.axes:
            choices = (fixed[axis],) if axis in fixed else range(size)
            found = [rank * size + index for rank in found for index in choices]
        return iter(found)

    def free(self, at: Slice) -> tuple[str, ...]:
        """The axes that a slice leaves open, in mesh order."""
        return tuple(axis for axis in self.names if axis not in at.axes)

    def position(self, coordinates: Mapping[str, int], axes: tuple[str, ...]) -> int:
        """The index of a rank along `axes`, flattened in mesh order."""
        index = 0
        for axis, size in self.axes:
            if axis in axes:
                index = index * size + coordinates[axis]
        return index


def mesh_problem(mesh: Mesh) -> str:
    """Why there can be no such mesh; '' if there can be. For meshes from files: `Schedule.mesh` says so
    with the user's line."""
    if len(set(mesh.names)) < len(mesh.names) or not all(mesh.names):
        return "two axes of the mesh have one name, or one has none"
    text = str(mesh)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    if any(not 1 <= size <= MAX_RANKS for _, size in mesh.axes) or mesh.size > MAX_RANKS:
        return f"the mesh is {text}; there can be 1 to {MAX_RANKS} ranks"
    return ""


class Group(msgspec.Struct, frozen=True):
    """Who communicates: ranks of `slices` that differ only along `over`, seen from each member."""

    slices: tuple[Slice, ...]
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'|'.join(map(str, self.slices))} over {','.join(self.over) or '-'}"

    def size(self, mesh: Mesh) -> int:
        return len(self.slices) * mesh.size_of(self.over)

    def ranks(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """All members of the group that `rank` belongs to, ascending."""
        offsets = [0]
        stride = 1
        for axis, size in reversed(mesh.axes):
            if axis in self.over:
                offsets = [o + index * stride for index in range(size) for o in offsets]
            stride *= size
        first = mesh.coordinates(rank) | dict.fromkeys(self.over, 0)
        starts = [mesh.rank(first | dict(part.fixed)) for part in self.slices]
        return tuple(sorted(start + offset for start in starts for offset in offsets))

    def shifts(self, mesh: Mesh, at: Slice) -> list[int]:
        """How far behind the group of a slice's first rank those of its other ranks lie."""
        same = {*at.axes, *self.over, *(axis for part in self.slices for axis in part.axes)}
        found, stride = [0], 1
        for axis, size in reversed(mesh.axes):
            if axis not in same:
                found = [shift + index * stride for index in range(size) for shift in found]
            stride *= size
        return found
