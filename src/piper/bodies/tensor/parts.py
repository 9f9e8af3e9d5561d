"""Parts of a dim: a Split and a shape in; one rank's shape, or the Split of a reshape, out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from piper.ir.layouts import Layout, Split, block_sizes


def dim_of(split: Split) -> int:
    """The dim that is cut; stacks do not occur here."""
    assert split.dim is not None
    return split.dim


def moved(split: Split, dim: int) -> Split:
    """The same cut of another dim."""
    return split.along(dim)


def dealt_blocks(split: Split, length: int) -> list[int]:
    """Sizes of blocks, negative where a block is dealt from its end."""
    sizes = block_sizes(split, length)
    return [-size if split.mirrored and at % 2 else size for at, size in enumerate(sizes)]


def local_shape(shape: Sequence[int], layout: Layout, size: int) -> tuple[int, ...]:
    """What one rank has of a tensor of this shape."""
    if not isinstance(layout, Split):
        return tuple(shape)
    return tuple(n // size if dim == layout.dim else n for dim, n in enumerate(shape))


def reshaped(split: Split, before: Sequence[int], after: Sequence[int], size: int) -> Split | None:
    """How the result of a reshape lies; None if a part of the one is not a part of the other."""
    if 0 in (*before, *after):
        return None  # of nothing there are no parts
    for of_before, of_after in _equal_groups(before, after):
        if split.dim in of_before:
            found = _in_group(split, before, after, of_before, of_after, size)
            return found if not split.order or _is_same(split, found, before, after) else None
    return None


def _is_same(
    split: Split, found: Split | None, before: Sequence[int], after: Sequence[int]
) -> bool:
    """Whether a reshape leaves the dim that is cut as it is: rows of a rank's own order stay rows."""
    if found is None or found.blocks != split.blocks:
        return False
    return after[dim_of(found)] == before[dim_of(split)]


def _equal_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Neighbouring dims of the one shape that are together as long as dims of the other."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        one = two = 1
        if i < len(before):
            one, i = before[i], i + 1
        if j < len(after):
            two, j = after[j], j + 1
        while one != two:
            if one < two:
                one, i = one * before[i], i + 1
            else:
                two, j = two * after[j], j + 1
        while i < len(before) and before[i] == 1 and j == len(after):
            i += 1
        while j < len(after) and after[j] == 1 and i == len(before):
            j += 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


def _in_group(
    split: Split,
    before: Sequence[int],
    after: Sequence[int],
    of_before: range,
    of_after: range,
    size: int,
) -> Split | None:
    if isinstance(split.blocks, tuple):
        alone = len(of_before) == len(of_after) == 1
        return split.along(of_after.start) if alone else None
    # The group flattened is so many blocks, each cut. They are blocks of the first dim of the result
    # below which all of them lie whole.
    flat = math.prod(before[of_before.start : dim_of(split)]) * split.blocks
    outer = 1
    for dim in of_after:
        blocks, rest = divmod(flat, outer)
        if rest == 0 and blocks > 0 and after[dim] % blocks == 0:
            length = after[dim] // blocks
            whole_pairs = not split.mirrored or blocks % 2 == 0
            if length > 1 and length % size == 0 and whole_pairs:
                return Split(dim, blocks, mirrored=split.mirrored, order=split.order)
        outer *= after[dim]
    return None
