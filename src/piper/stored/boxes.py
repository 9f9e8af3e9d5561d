"""Boxes: rectangles of tensors, and the ranges of elements that ranks hold, made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import msgspec

from piper.plan.tensor_parts import Part


class Box(msgspec.Struct, frozen=True):
    """A rectangular part of a tensor: per dim where it starts, and its size."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes it in the tensor."""
        pairs = zip(self.start, self.size, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


class Patch(NamedTuple):
    """Where the elements of a `box` of a tensor lie in a range of elements: from `offset` on that has a
    `run` of this shape, and they are the box `inside` of it."""

    offset: int
    run: tuple[int, ...]
    inside: Box
    box: Box


def patches_in(part: Part, first: int, last: int) -> Iterator[Patch]:
    """The boxes of a tensor that elements `first` to `last` of a rank's part of it consist of."""
    offset = 0
    for run in boxes_in(whole(part.size), first, last):
        dims = zip(part.spans, run.start, run.size, strict=True)
        for pairs in product(*(list(_common(spans, begin, num)) for spans, begin, num in dims)):
            size = tuple(num for _, _, num in pairs)
            inside = Box(tuple(at for at, _, _ in pairs), size)
            yield Patch(offset, run.size, inside, Box(tuple(to for _, to, _ in pairs), size))
        offset += run.num_elements


def _common(
    spans: tuple[tuple[int, int], ...], begin: int, num: int
) -> Iterator[tuple[int, int, int]]:
    """What some positions of a rank's own dim have of each span: from which of them on, from which
    position of the tensor's dim on, and how many."""
    at = 0
    for start, length in spans:
        first, last = max(begin, at), min(begin + num, at + length)
        if first < last:
            yield first - begin, start + first - at, last - first
        at += length


def boxes_in(box: Box, first: int, last: int) -> Iterator[Box]:
    """The fewest boxes that elements `first` to `last` of a box consist of, in row-major order, each
    of which lies there in one run."""
    if first >= last:
        return
    if (first, last) == (0, box.num_elements):
        yield box
        return
    row = math.prod(box.size[1:])
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:  # all within one row
        yield from _in_row(box, end, first - end * row, last - end * row)
        return
    yield from _in_row(box, begin - 1, first - (begin - 1) * row, row)
    if begin < end:
        yield Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.size[1:]))
    yield from _in_row(box, end, 0, last - end * row)


def _in_row(box: Box, row: int, first: int, last: int) -> Iterator[Box]:
    """Boxes of a range within one row of a box."""
    for inner in boxes_in(Box(box.start[1:], box.size[1:]), first, last):
        yield Box((box.start[0] + row, *inner.start), (1, *inner.size))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    start = tuple(map(max, one.start, other.start))
    ends = zip(one.start, one.size, other.start, other.size, strict=True)
    size = tuple(min(a + n, b + m) - s for s, (a, n, b, m) in zip(start, ends, strict=True))
    return None if any(num <= 0 for num in size) else Box(start, size)


def within(box: Box, other: Box) -> Box:
    """A box counted from the start of another one that it lies in."""
    start = tuple(a - b for a, b in zip(box.start, other.start, strict=True))
    return Box(start, box.size)


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def runs_in(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the elements of a box lie in a tensor of this shape: from where on, and how many."""
    return runs_by(box, row_major(shape))


def runs_by(box: Box, strides: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the elements of a box lie, if those along each dim are so many apart: from where on, and how
    many. They come as if dims stood in the order of their strides: see `memory_order`."""
    dims = [dim for dim in memory_order(strides) if box.size[dim] != 1]
    length = 1
    while dims and strides[dims[-1]] == length:  # neighbours along all dims so far
        length *= box.size[dims.pop()]
    begin = sum(s * stride for s, stride in zip(box.start, strides, strict=True))

    def walk(depth: int, at: int) -> Iterator[tuple[int, int]]:
        if depth == len(dims):
            yield at, length
            return
        for number in range(box.size[dims[depth]]):
            yield from walk(depth + 1, at + number * strides[dims[depth]])

    yield from walk(0, begin)


def memory_order(strides: tuple[int, ...]) -> list[int]:
    """The dims, from the one along which elements are furthest apart."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart elements are along each dim of a tensor that lies one row after the other."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
