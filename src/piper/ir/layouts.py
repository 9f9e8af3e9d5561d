"""Layouts: how a tensor lies along each axis of the mesh, and which communication changes that.

Layouts of a Value are pairs (axis, layout), for all axes of its slice that have an owner. All
communication along axes follows from one table, `conversion`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from piper.errors import PlanError
from piper.ir.tensor_type import TensorType
from piper.mesh import Mesh


class Replicated(msgspec.Struct, frozen=True, tag="replicated"):
    """The same on every rank of the axis, and so is its gradient."""

    def __str__(self) -> str:
        return "replicated"


class Split(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True, tag="split"):
    """Cut along `dim`, one part a rank. Without a dim the whole is a stack, and each rank has its own
    entry: a Value of one rank's microbatch that has no rows. With `blocks`, so many equal ones or ones
    of these sizes, each block is cut, and a rank has its part of every one; `mirrored`, every second
    block is dealt from its end. At `turn` n of a ring a rank has what is the part of the rank n places
    before it. With an `order`, a number of the program, each rank has sorted its own rows: which of them
    are where is known to that rank alone."""

    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    turn: int = 0
    mirrored: bool = False
    order: int = 0

    def along(self, dim: int) -> Split:
        """The same cut of another dim."""
        return msgspec.structs.replace(self, dim=dim)

    def at_turn(self, turn: int) -> Split:
        return msgspec.structs.replace(self, turn=turn)

    def sorted_as(self, order: int) -> Split:
        """The same rows in an order of each rank's own; 0 is that of the whole."""
        return msgspec.structs.replace(self, order=order)

    def __str__(self) -> str:
        if self.dim is None:
            return f"stacked({self.order})" if self.order else "stacked"
        sizes = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        blocks = f"|{'+'.join(map(str, sizes))}" if self.blocks != 1 else ""
        turn = f" turn {self.turn}" if self.turn else ""
        order = f" order {self.order}" if self.order else ""
        return f"split({self.dim}{blocks}{' mirrored' if self.mirrored else ''}{turn}{order})"


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """Each rank has a term; the whole is their sum."""

    def __str__(self) -> str:
        return "partial"


class Routed(msgspec.Struct, frozen=True, omit_defaults=True, tag="routed"):
    """Rows lie where their expert is, as the counts `by` say."""

    by: str = ""

    def __str__(self) -> str:
        return f"routed({self.by})"


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """The same on every rank, in code that differs between ranks, so that its gradient is partial."""

    def __str__(self) -> str:
        return "shared"


Layout = Replicated | Split | Partial | Routed | Shared
Layouts = tuple[tuple[str, Layout], ...]
Change = Literal[
    "", "own_part", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift"
]

REPLICATED, PARTIAL, SHARED, STACKED = Replicated(), Partial(), Shared(), Split()
_PLAIN: dict[str, Layout] = {str(each): each for each in (REPLICATED, PARTIAL, SHARED, STACKED)}

# (made, read) -> what brings the one into the other; "" is nothing. The backward of a change leads from
# the dual of what was read to the dual of what was made.
_CHANGES: dict[tuple[type, type], Change] = {
    (Partial, Replicated): "all_reduce",
    (Partial, Shared): "all_reduce",
    (Partial, Split): "reduce_scatter",
    (Replicated, Shared): "",
    (Replicated, Split): "own_part",
    (Split, Replicated): "all_gather",
    (Split, Shared): "all_gather",
    (Split, Routed): "all_to_all",
    (Routed, Split): "all_to_all",
}


def dual(layout: Layout) -> Layout:
    """How the gradient of a Value lies that is made, or read, so."""
    if isinstance(layout, Partial):
        return SHARED
    return PARTIAL if isinstance(layout, Shared) else layout


def order_of(layout: Layout) -> int:
    """The number of the order in which each rank has its own rows; 0 is none."""
    return layout.order if isinstance(layout, Split) else 0


def _between_splits(made: Split, read: Split) -> Change | None:
    if None in (made.dim, read.dim):
        return None
    if made.at_turn(0) == read.at_turn(0):
        return "shift" if abs(made.turn - read.turn) == 1 else None
    # Of one dim in other blocks, ranks would not exchange equal parts.
    plain = made.turn == read.turn == 0 and made.dim != read.dim
    return "all_to_all" if plain else None


def conversion(made: Layout, read: Layout) -> Change:
    """The communication that lays out anew, along one axis, what was made in another layout."""
    if made == read:
        return ""
    change: Change | None = None
    own_orders = order_of(made) or order_of(read)
    if own_orders and not isinstance(made, Routed) and not isinstance(read, Routed):
        pass  # nobody knows where the others' rows are
    elif isinstance(made, Split) and isinstance(read, Split):
        change = _between_splits(made, read)
    else:
        change = _CHANGES.get((type(made), type(read)))
    if change is None:
        raise PlanError(
            f"nothing turns a {made} Value into a {read} one",
            legal=", ".join(f"{a.__name__} -> {b.__name__}".lower() for a, b in _CHANGES),
        )
    return change


def shifts_back(made: Layouts, read: Layouts) -> bool:
    """Whether what is shifted goes to the rank before, as gradients do."""
    after = dict(read)
    return any(
        isinstance(way, Split) and isinstance(now := after.get(axis), Split) and way.turn > now.turn
        for axis, way in made
    )


@lru_cache(maxsize=4096)
def change_between(made: Layouts, read: Layouts, mesh: Mesh) -> tuple[Change, tuple[str, ...]]:
    """The one kind of communication that turns `made` into `read`, and the axes along which it goes."""
    if made == read:
        return "", ()
    wanted = dict(read)
    axes: dict[Change, list[str]] = {}
    for axis, layout in made:
        if axis not in wanted:
            raise PlanError(f"a Value lies along {axis}, and is read along {', '.join(wanted)}")
        if mesh.size_of((axis,)) > 1 and (change := conversion(layout, wanted[axis])):
            axes.setdefault(change, []).append(axis)
    if len(axes) > 1:
        raise PlanError(f"a Value needs {' and '.join(axes)} at once")
    return next(((change, tuple(along)) for change, along in axes.items()), ("", ()))


def local(whole: TensorType, layouts: Layouts, mesh: Mesh) -> TensorType:
    """What one rank has of a Value: its part along every dim that an axis cuts."""
    shape = list(whole.shape)
    sizes = dict(mesh.axes)
    routed = 1
    for axis, layout in layouts:
        dim = 0 if isinstance(layout, Routed) else getattr(layout, "dim", None)
        if dim is None or sizes[axis] == 1:
            continue
        if dim >= len(shape) or shape[dim] % sizes[axis]:
            raise PlanError(f"{whole} does not divide over {axis}={sizes[axis]} ({layout})")
        shape[dim] //= sizes[axis]
        routed *= sizes[axis] if isinstance(layout, Routed) else 1
    bound = shape[0] * routed if routed > 1 else whole.bound
    return TensorType(tuple(shape), whole.dtype, bound)


def split_in(dim: int, sizes: Sequence[int]) -> Split:
    """Split along `dim` in blocks of these sizes; equal ones are counted."""
    return Split(dim, len(sizes) if len(set(sizes)) == 1 else tuple(sizes))


def block_sizes(split: Split, length: int) -> tuple[int, ...]:
    """Of the blocks of a dim of this length."""
    blocks = split.blocks
    return blocks if isinstance(blocks, tuple) else (length // blocks,) * blocks


def divides(split: Split, shape: Sequence[int], size: int) -> bool:
    """Whether there is such a dim, and every block of it has equal parts, one for each of `size` ranks.
    It takes no longer for more blocks where these are counted."""
    dim, blocks = split.dim, split.blocks
    if dim is None or not 0 <= dim < len(shape):
        return False
    if isinstance(blocks, tuple):
        fill = sum(blocks) == shape[dim] and min(blocks, default=0) > 0
        return fill and all(block % size == 0 for block in blocks)
    return blocks > 0 and shape[dim] % blocks == 0 and (shape[dim] // blocks) % size == 0


def local_shape(shape: tuple[int, ...], layout: Layout, size: int) -> tuple[int, ...]:
    """What one of `size` ranks has of a shape."""
    dim = layout.dim if isinstance(layout, Split) else None
    return tuple(num // size if at == dim else num for at, num in enumerate(shape))


def whole_type(part: TensorType, layouts: Layouts, sizes: Mapping[str, int]) -> TensorType:
    """The whole of which one rank has a part: the inverse of `local` along axes that cut dims."""
    shape = list(part.shape)
    for axis, layout in layouts:
        if isinstance(layout, Split) and layout.dim is not None:
            shape[layout.dim] *= sizes[axis]
    return msgspec.structs.replace(part, shape=tuple(shape))


def in_dims_of(read: Layouts, made: Layouts, by: int) -> Layouts:
    """How a Value lies, in the dims of what is made of it: where parts are stacked along a new dim, or
    taken from such a stack, all others move `by` one. Of a Value inside of code that is cut along two
    axes one after the other it is known only that each rank has its own part, not along which dim."""
    wanted = dict(read)

    def moved(axis: str, way: Layout) -> Layout:
        other = wanted.get(axis)
        if not isinstance(way, Split) or not isinstance(other, Split):
            return way
        if way.dim is None or other.dim is None:
            return other
        alike = way.along(way.dim + by)
        return alike if by and other == alike else way

    return tuple((axis, moved(axis, way)) for axis, way in made)


def as_routed(cut: Layouts, layout: Iterable[tuple[str, Layout]]) -> Layouts:
    """How code has rows that lie with their experts along the axes for which `layout` says so."""
    ways = dict(layout)
    return tuple((a, ways[a] if isinstance(ways.get(a), Routed) else way) for a, way in cut)


def is_read_as(made: Layout, read: Layout) -> bool:
    """Whether what lies in one way is also what lies in the other."""
    same = (Replicated, Shared)
    if isinstance(made, Split) and isinstance(read, Split) and None in (made.dim, read.dim):
        return True  # each rank has its own part
    return made == read or (isinstance(made, same) and isinstance(read, same))


def layouts_text(layouts: Layouts) -> str:
    return "; ".join(f"{axis}: {layout}" for axis, layout in layouts)


_TEXT = re.compile(r"(?P<kind>replicated|stacked|partial|shared|split|routed)(?:\((?P<of>.*)\))?$")
_SPLIT = re.compile(
    r"(?P<dim>\d+)(?:\|(?P<blocks>\d+(?:\+\d+)*))?(?P<mirrored> mirrored)?"
    r"(?: turn (?P<turn>\d+))?(?: order (?P<order>\d+))?$"
)


def layouts_from_text(text: str) -> Layouts:
    """The inverse of `layouts_text`; raises PlanError."""
    words = (word.partition(": ") for word in text.split("; ") if word)
    return tuple((axis, layout_from_text(shown)) for axis, _, shown in words)


def layout_from_text(text: str) -> Layout:
    """The inverse of `str`; raises PlanError."""
    match = _TEXT.match(text)
    cut = _SPLIT.match(match["of"] or "") if match and match["kind"] == "split" else None
    if match is None or (match["kind"] == "split" and cut is None):
        raise PlanError(f"{text!r} is no layout", legal="replicated, split(0), partial ...")
    if cut is not None:
        sizes = tuple(int(size) for size in (cut["blocks"] or "1").split("+"))
        blocks = sizes if len(sizes) > 1 else sizes[0]
        turn, order = (int(cut[name] or 0) for name in ("turn", "order"))
        return Split(int(cut["dim"]), blocks, turn, bool(cut["mirrored"]), order)
    if match["kind"] == "stacked" and match["of"]:
        return STACKED.sorted_as(int(match["of"]))
    return Routed(match["of"] or "") if match["kind"] == "routed" else _PLAIN[match["kind"]]
