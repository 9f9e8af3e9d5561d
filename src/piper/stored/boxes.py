"""Boxes: rectangular parts of tensors, and the ranges of elements that ranks hold, made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from piper.plan.holdings import Box


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
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # dims from here on are whole
    while inner and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # dims before this one are walked through
    length = math.prod(box.size[outer:])
    begin = sum(s * stride for s, stride in zip(box.start, strides, strict=True))

    def walk(dim: int, at: int) -> Iterator[tuple[int, int]]:
        if dim == outer:
            yield at, length
            return
        for number in range(box.size[dim]):
            yield from walk(dim + 1, at + number * strides[dim])

    yield from walk(0, begin)
