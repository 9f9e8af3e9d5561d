"""Own orders: rows that each rank has sorted by itself, as a chunk numbers their orders and as the
program does; and the code of sharded experts for as many rows as one rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper.bodies.chunk_code import ChunkCode
from piper.bodies.tensor.changes import SortedApartError
from piper.ir.layouts import STACKED, Layout, Split, local_shape, order_of
from piper.ir.tensor_type import TensorType


class OwnOrders:
    """Of a program. Equal chunks are cut once, so that each numbers its own orders from 1 on: first
    those of its inputs, then those that it makes."""

    def __init__(self) -> None:
        self.num = 0

    def inside(self, layouts: Mapping[int, Layout]) -> tuple[dict[int, Layout], list[int]]:
        """Layouts of a chunk's inputs by its own numbers, and the program's for these."""
        numbers: list[int] = []
        found: dict[int, Layout] = {}
        for index, layout in layouts.items():
            if isinstance(layout, Split) and layout.order:
                if layout.order not in numbers:
                    numbers.append(layout.order)
                layout = layout.sorted_as(numbers.index(layout.order) + 1)
            found[index] = layout
        return found, numbers

    def outside(self, layout: Layout, numbers: list[int]) -> Layout:
        """A layout of the chunk by the program's numbers, of which its new orders get the next."""
        if not isinstance(layout, Split) or not layout.order:
            return layout
        while len(numbers) < layout.order:
            self.num += 1
            numbers.append(self.num)
        return layout.sorted_as(numbers[layout.order - 1])


def rows_of_experts(code: ChunkCode, layouts: Mapping[int, Layout]) -> Split | None:
    """How the rows of sharded experts lie, where each rank has sorted its own."""
    sorted_rows = (layout for layout in layouts.values() if order_of(layout))
    orders = [way for way in sorted_rows if isinstance(way, Split) and way.dim is not None]
    if not orders:
        return None
    rows = orders[0]
    counts = STACKED.sorted_as(rows.order)
    for index, given in enumerate(code.inputs):
        if not given.param and layouts.get(index) not in (rows, counts):
            raise SortedApartError("experts that are sharded read rows in two orders")
        if given.param and index in layouts:
            raise SortedApartError("experts that are sharded are cut, and need rows of all ranks")
    return rows


def with_own_rows(
    code: ChunkCode, layouts: Mapping[int, Layout], rows: Split, size: int
) -> ChunkCode:
    """Code that takes any number of rows, for those of one of `size` ranks."""

    def own(spec: TensorType) -> TensorType:
        return TensorType(local_shape(spec.shape, rows, size), spec.dtype, spec.bound)

    inputs = tuple(
        replace(given, spec=own(given.spec)) if layouts.get(index) == rows else given
        for index, given in enumerate(code.inputs)
    )
    return replace(code, inputs=inputs, outputs=tuple(map(own, code.outputs)))
