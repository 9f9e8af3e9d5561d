"""Tables: for each rank the sequence of its actions, printed and parsed as `2F0,2F1,2B0`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from piper.errors import Call, ScheduleError, user_source

Kind = Literal["F", "B", "BI", "BW"]
_LETTER = {"F": "F", "B": "B", "BI": "I", "BW": "W"}
_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")


class Action(msgspec.Struct, frozen=True, order=True):
    """One phase of one stage for one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{_LETTER[self.kind]}{self.microbatch}"


Cell = tuple[Action, ...]  # the actions that a rank runs together


class Table(msgspec.Struct, frozen=True):
    """A schedule: row r holds what pipeline rank r runs, in order."""

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    def rank_of(self, stage: int) -> int:
        """The rank whose row runs a stage."""
        for rank, row in enumerate(self.rows):
            if any(action.stage == stage for cell in row for action in cell):
                return rank
        raise ScheduleError(f"schedule {self.name}: no row runs stage {stage}")

    def as_csv(self) -> str:
        return "\n".join(",".join(_cell_text(cell) for cell in row) for row in self.rows) + "\n"


def _cell_text(cell: Cell) -> str:
    if len(cell) == 1:
        return str(cell[0])
    return f"({';'.join(map(str, cell))})OVERLAP_F_B"


def parse_action(text: str) -> Action:
    match = _ACTION.match(text.strip())
    if not match:
        raise ScheduleError(f"{text!r} is not an action", legal="<stage><F|B|I|W><microbatch>")
    return Action(int(match[1]), _KIND[match[2]], int(match[3]))


def make_table(
    name: str, num_stages: int, num_microbatches: int, rows: Iterable[Iterable[Action]]
) -> Table:
    """A table of rows that run one action at a time."""
    cells = tuple(tuple((action,) for action in row) for row in rows)
    return Table(name, num_stages, num_microbatches, cells)


def schedule_call(name: str) -> Call:
    """Who asked for a schedule, for errors."""
    return Call(f"schedule {name}", user_source())


def check_sizes(name: str, *, at_least: int = 1, **sizes: int) -> None:
    """Raise unless every size is at least `at_least`."""
    for what, size in sizes.items():
        if size < at_least:
            raise ScheduleError(
                f"{what} is {size}",
                call=schedule_call(name),
                legal=f"{what} of at least {at_least}",
            )
