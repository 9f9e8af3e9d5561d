"""Tables: for each rank the sequence of its actions, printed and parsed as `2F0,2F1,2B0`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

Kind = Literal["F", "B", "BI", "BW"]
LETTER: dict[Kind, str] = {"F": "F", "B": "B", "BI": "I", "BW": "W"}


class Action(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """One phase of one stage for one microbatch, of one direction where there are two."""

    stage: int
    kind: Kind
    microbatch: int
    direction: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{LETTER[self.kind]}{self.microbatch}"
        return text if self.direction is None else f"d{self.direction}:{text}"


class Cell(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank runs at a time: one action, or several that start and end together.

    `OVERLAP_F_B` runs a forward and a backward side by side; `FUSED` runs its actions one after
    the other, and others see its results at its end.
    """

    actions: tuple[Action, ...]
    joined: Literal["", "OVERLAP_F_B", "FUSED"] = ""

    def __str__(self) -> str:
        if not self.joined:
            return str(self.actions[0])
        return f"({';'.join(map(str, self.actions))}){self.joined}"


Row = tuple[Cell, ...]


class Table(msgspec.Struct, frozen=True):
    """A schedule: row r holds what pipeline rank r runs, in order.

    With two directions each runs half of the `num_microbatches`, numbered from 0.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[Row, ...]
    num_directions: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def stages_per_rank(self) -> int:
        """On average, rounded down: a user's table may give ranks different numbers of stages."""
        return self.num_stages * self.num_directions // self.num_ranks

    def actions(self) -> Iterator[Action]:
        for row in self.rows:
            for cell in row:
                yield from cell.actions

    def placement(self) -> list[dict[int, int]]:
        """For each direction the rank of each stage, by stage."""
        found: list[dict[int, int]] = [{} for _ in range(self.num_directions)]
        for rank, row in enumerate(self.rows):
            for cell in row:
                for action in cell.actions:
                    found[action.direction or 0].setdefault(action.stage, rank)
        return [dict(sorted(ranks.items())) for ranks in found]

    def __str__(self) -> str:
        head = f"{self.name}: {self.num_stages} stages, {self.num_microbatches} microbatches"
        rows = [f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)]
        return "\n".join([head, *rows])

    def as_csv(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.rows) + "\n"


def make_table(
    name: str,
    rows: Iterable[Iterable[Action | Cell]],
    *,
    num_stages: int,
    num_microbatches: int,
    num_directions: int = 1,
) -> Table:
    """A table of rows of cells, where a single action may stand for its cell."""
    cells = tuple(
        tuple(item if isinstance(item, Cell) else Cell((item,)) for item in row) for row in rows
    )
    return Table(name, num_stages, num_microbatches, cells, num_directions)


def pair(forward: Action, backward: Action) -> Cell:
    """A forward and a backward that run side by side."""
    return Cell((forward, backward), "OVERLAP_F_B")


def without(rows: Iterable[Sequence[Action]], microbatches: int) -> list[list[Action]]:
    """The rows with only the first `microbatches`; what is left keeps its order."""
    return [[action for action in row if action.microbatch < microbatches] for row in rows]
