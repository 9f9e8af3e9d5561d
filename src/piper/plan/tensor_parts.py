"""Parts of tensors: a tensor of the model and a rank's coordinates in; which positions it has out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from piper.ir.layouts import Split, block_sizes
from piper.mesh import Mesh
from piper.plan.types import ModelTensor

Span = tuple[int, int]  # from which position on, and how many


class Part(msgspec.Struct, frozen=True):
    """What a rank has of a tensor: along each dim some spans of positions, side by side.

    A dim that is whole, or cut, has one; a dim that is cut in blocks has one of each block. Spans are in
    order and do not touch, so that equal parts are equal data.
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Of the rank's own tensor."""
        return tuple(sum(num for _, num in spans) for spans in self.spans)

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def meets(self, other: Part) -> bool:
        """Whether two parts of a tensor have elements in common."""
        return all(
            any(a < b + m and b < a + n for a, n in mine for b, m in theirs)
            for mine, theirs in zip(self.spans, other.spans, strict=True)
        )


def all_of(shape: tuple[int, ...]) -> Part:
    """The part that is the whole tensor."""
    return Part(tuple(((0, num),) for num in shape))


def part_of(tensor: ModelTensor, mesh: Mesh, coordinates: Mapping[str, int]) -> Part:
    """What the rank at these coordinates has of a tensor. Axes cut one after the other: each cuts what
    those before it have left."""
    spans = list(all_of(tensor.shape).spans)
    sizes = dict(mesh.axes)
    for axis, split in tensor.cut:
        assert split.dim is not None
        spans[split.dim] = _cut(spans[split.dim], split, coordinates[axis], sizes[axis])
    return Part(tuple(spans))


def _cut(spans: tuple[Span, ...], split: Split, place: int, num_ranks: int) -> tuple[Span, ...]:
    """One rank's part of every block of a dim, of which only these spans are left."""
    found: list[Span] = []
    begin = 0
    for block in block_sizes(split, sum(num for _, num in spans)):
        own = block // num_ranks
        found += _inside(spans, begin + place * own, own)
        begin += block
    return _joined(found) or ((spans[0][0], 0),)


def _inside(spans: tuple[Span, ...], first: int, num: int) -> Iterable[Span]:
    """The positions from the first to the last of some that are counted through all spans."""
    at = 0
    for start, length in spans:
        begin, end = max(first, at), min(first + num, at + length)
        if begin < end:
            yield start + begin - at, end - begin
        at += length


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Spans that touch are one."""
    found: list[Span] = []
    for start, num in spans:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + num)
        else:
            found.append((start, num))
    return tuple(found)
