"""Chunks: regions cut into maximal convex pieces, so that pieces form a DAG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from piper.ir.nodes import Tags


def cut(
    nodes: Sequence[fx.Node],
    regions: dict[fx.Node, Tags],
    inputs: Callable[[fx.Node], Iterable[fx.Node]],
) -> dict[fx.Node, int]:
    """The chunk of each node; chunks are numbered in a topological order.

    A node joins the newest chunk of its region unless something outside of that chunk lies between
    them; then it opens a new one.
    """
    pieces = _Pieces()
    newest: dict[Tags, int] = {}
    chunk: dict[fx.Node, int] = {}
    for node in nodes:
        before = {chunk[arg] for arg in inputs(node) if arg in chunk}
        region = regions[node]
        home = newest.get(region)
        if home is None or any(pieces.reaches(home, piece) for piece in before - {home}):
            home = newest[region] = pieces.new()
        pieces.connect(before - {home}, home)
        chunk[node] = home
    number = pieces.topological_numbers()
    return {node: number[piece] for node, piece in chunk.items()}


class _Pieces:
    """A growing DAG of pieces with its transitive closure, as bit sets."""

    def __init__(self) -> None:
        self.above: list[int] = []  # per piece, the set of all its ancestors

    def new(self) -> int:
        self.above.append(0)
        return len(self.above) - 1

    def reaches(self, start: int, goal: int) -> bool:
        return bool(self.above[goal] >> start & 1)

    def connect(self, before: set[int], home: int) -> None:
        added = 0
        for piece in before:
            added |= self.above[piece] | 1 << piece
        if added & ~self.above[home]:
            self.above[home] |= added
            for piece, above in enumerate(self.above):
                if above >> home & 1:
                    self.above[piece] |= added

    def topological_numbers(self) -> dict[int, int]:
        order = sorted(range(len(self.above)), key=lambda p: (self.above[p].bit_count(), p))
        return {piece: number for number, piece in enumerate(order)}
