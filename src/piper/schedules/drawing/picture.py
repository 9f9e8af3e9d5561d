"""Picture: a table and its replay in; bars with a label, a colour and a place in time out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.schedules.replay import Replay
from piper.schedules.table import Cell, Table


class Style(msgspec.Struct, frozen=True):
    """One meaning in one colour, the same on paper (web colour) and in a terminal (256 colours)."""

    meaning: str
    web: str
    terminal: int


STYLES = {
    "F": Style("forward", "#7da7f0", 111),
    "B": Style("backward", "#f5a54a", 215),
    "BI": Style("input half of a backward", "#4fc4c0", 80),
    "BW": Style("weight half of a backward", "#86c56b", 114),
    "F&B": Style("a forward and a backward side by side", "#b491de", 141),
}


class Bar(msgspec.Struct, frozen=True):
    rank: int
    start: float
    end: float
    label: str
    style: Style


def bars(table: Table, replay: Replay) -> Iterator[Bar]:
    for rank, row in enumerate(table.rows):
        for cell, start, end in zip(row, replay.starts[rank], replay.ends[rank], strict=True):
            yield Bar(rank, start, end, _label(cell), _style(cell))


def styles_of(table: Table) -> list[Style]:
    """The styles that a picture of the table needs, for its legend."""
    used = {_style(cell) for row in table.rows for cell in row}
    return [style for style in STYLES.values() if style in used]


def _label(cell: Cell) -> str:
    return ("&" if cell.joined == "OVERLAP_F_B" else "+").join(map(str, cell.actions))


def _style(cell: Cell) -> Style:
    kinds = {action.kind for action in cell.actions}
    if len(cell.actions) == 1:
        return STYLES[cell.actions[0].kind]
    return STYLES["F&B"] if "F" in kinds else STYLES["B"]


def ticks(end: float, *, about: int) -> list[float]:
    """About so many round times from 0 to the end."""
    if end <= 0:
        return [0.0]
    step, factor = 10.0**-9, 0
    while end / step > about:
        step *= (2, 2.5, 2)[factor % 3]
        factor += 1
    return [i * step for i in range(int(end / step + 1e-9) + 1)]
