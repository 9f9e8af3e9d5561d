"""Layouts: how a tensor lies along each axis of the mesh, and which communication changes that.

Layouts of a Value are pairs (axis, layout), for all axes of its slice that have an owner. All
communication along axes follows from one table, `conversion`.
"""

from __future__ import annotations

import re
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


class Split(msgspec.Struct, frozen=True, omit_defaults=True, tag="split"):
    """Cut along `dim`, one part a rank. Without a dim the whole is a stack, and each rank has its own
    entry: a Value of one rank's microbatch that has no rows."""

    dim: int | None = None

    def __str__(self) -> str:
        return "stacked" if self.dim is None else f"split({self.dim})"


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
Change = Literal["", "own_part", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

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


def conversion(made: Layout, read: Layout) -> Change:
    """The communication that lays out anew, along one axis, what was made in another layout."""
    if made == read:
        return ""
    if isinstance(made, Split) and isinstance(read, Split) and None not in (made.dim, read.dim):
        return "all_to_all"
    change = _CHANGES.get((type(made), type(read)))
    if change is None:
        raise PlanError(
            f"nothing turns a {made} Value into a {read} one",
            legal=", ".join(f"{a.__name__} -> {b.__name__}".lower() for a, b in _CHANGES),
        )
    return change


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


def layouts_text(layouts: Layouts) -> str:
    return "; ".join(f"{axis}: {layout}" for axis, layout in layouts)


_TEXT = re.compile(r"(?P<kind>replicated|stacked|partial|shared|split|routed)(?:\((?P<of>.*)\))?$")


def layouts_from_text(text: str) -> Layouts:
    """The inverse of `layouts_text`; raises PlanError."""
    words = (word.partition(": ") for word in text.split("; ") if word)
    return tuple((axis, layout_from_text(shown)) for axis, _, shown in words)


def layout_from_text(text: str) -> Layout:
    """The inverse of `str`; raises PlanError."""
    match = _TEXT.match(text)
    if match is None or (match["kind"] == "split" and not (match["of"] or "").isdigit()):
        raise PlanError(f"{text!r} is no layout", legal="replicated, split(0), partial ...")
    if match["kind"] == "split":
        return Split(int(match["of"]))
    return Routed(match["of"] or "") if match["kind"] == "routed" else _PLAIN[match["kind"]]
