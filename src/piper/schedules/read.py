"""Read: a table that a user wrote (CSV, JSON, or rows from Python) in, a checked Table out."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from piper.errors import Call, ScheduleError, Source, user_source
from piper.schedules.check import check
from piper.schedules.table import Action, Cell, Kind, Table

VERSION = 1  # of the JSON form

Item = str | Action | Cell | None
_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
_ACTION = re.compile(r"(?:d(\d+):)?(\d+)([FBIW])(\d+)")
_JOINED = re.compile(r"\((.*)\)(OVERLAP_F_B|FUSED)")
# What Piper's compiler adds itself, from the graph: it may stand in a table, and is left out.
_COMMUNICATION = re.compile(
    r"(?:d\d+:)?\d+(?:(?:SEND|RECV)_[FB]\d+|(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*)"
)
_LEGAL = "0F3, 0B3, 0I3, 0W3, (0F3;3B1)OVERLAP_F_B, (0F3;0B3)FUSED, d1:0F3"


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file that ends in .csv or .json."""
    file = os.fspath(path)
    name = os.path.basename(file)
    try:
        with open(file, encoding="utf-8-sig") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ScheduleError(f"{file} cannot be read: {reason}", call=_call("schedule")) from None
    if file.endswith(".json"):
        return parse_json(text, name=name, file=file)
    if file.endswith(".csv"):
        return parse_csv(text, name=name, file=file)
    raise ScheduleError(f"{file} is no table", call=_call("schedule"), legal="a .csv or .json file")


def parse_csv(text: str, *, name: str, file: str | None = None) -> Table:
    """A table of one line per rank, comma-separated; empty cells are idle time and left out."""
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    sources = [Source(os.path.abspath(file), number) for number, _ in lines] if file else None
    return from_rows([line for _, line in lines], name=name, sources=sources)


def parse_json(text: str, *, name: str, file: str | None = None) -> Table:
    """A table of JSON: `{"rows": [["0F0", "0B0"], ...]}`, or the list of rows alone."""
    source = Source(os.path.abspath(file), 1) if file else None
    legal = '{"name": "mine", "rows": [["0F0", "0B0"], ["1F0", "1B0"]]}'
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        source = Source(os.path.abspath(file), line) if file else None
        raise ScheduleError(
            f"not JSON: {error}", call=Call(f"table {name}", source), legal=legal
        ) from None
    version = found.get("version", VERSION) if isinstance(found, Mapping) else VERSION
    if version != VERSION:
        raise ScheduleError(
            f"a table of version {version!r} is not readable",
            call=Call(f"table {name}", source),
            legal=f"version {VERSION}",
        )
    rows: Any = found.get("rows") if isinstance(found, Mapping) else found
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not lists or not all(isinstance(cell, str | None) for row in rows for cell in row):
        raise ScheduleError(
            "rows is not a list of lists of actions",
            call=Call(f"table {name}", source),
            legal=legal,
        )
    own = found.get("name", name) if isinstance(found, Mapping) else name
    return from_rows(rows, name=str(own), sources=[source] * len(rows) if source else None)


def from_rows(
    rows: Iterable[str | Iterable[Item]],
    *,
    name: str = "table",
    sources: Sequence[Source] | None = None,
) -> Table:
    """The checked table of these rows: strings such as "0F0,0F1,0B0", or actions one by one.

    There are as many stages as the highest one named, and as many microbatches as most stages run.
    """
    cells: list[tuple[Cell, ...]] = []
    for rank, row in enumerate(rows):
        items = row.split(",") if isinstance(row, str) else row
        call = Call(f"table {name}", sources[rank] if sources else user_source())
        read = (_cell(item, call, rank, index) for index, item in enumerate(items))
        cells.append(tuple(cell for cell in read if cell is not None))
    call = Call(f"table {name}", sources[0] if sources else user_source())
    actions = [action for row in cells for cell in row for action in cell.actions]
    if not actions:
        raise ScheduleError("the table is empty", call=call, legal="one row per rank")
    directions = {action.direction for action in actions}
    if directions not in ({None}, {0, 1}):
        shown = ", ".join("none" if d is None else f"d{d}:" for d in sorted(directions, key=str))
        raise ScheduleError(
            f"the directions are {shown}", call=call, legal="no direction, or d0: and d1:"
        )
    forwards = {(a.direction, a.stage, a.microbatch) for a in actions if a.kind == "F"}
    runs = Counter(Counter((direction, stage) for direction, stage, _ in forwards).values())
    table = Table(
        name,
        1 + max(action.stage for action in actions),
        max(runs, key=lambda num: (runs[num], num), default=0) * len(directions),
        tuple(cells),
        len(directions),
    )
    return check(table, sources=sources)


def parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if not match:
        raise ScheduleError(f"{text!r} is not an action", legal=_LEGAL)
    direction = None if match[1] is None else int(match[1])
    return Action(int(match[2]), _KIND[match[3]], int(match[4]), direction)


def _cell(item: Item, call: Call, rank: int, index: int) -> Cell | None:
    """A cell, or None for idle time and communication."""
    if isinstance(item, Cell):
        return item
    if isinstance(item, Action):
        return Cell((item,))
    if not isinstance(item, str | None):
        _refuse_item(item, call, rank, index)
    text = (item or "").strip().strip('"')
    if not text or _COMMUNICATION.fullmatch(text):
        return None
    joined = _JOINED.fullmatch(text)
    try:
        if joined:
            members = tuple(parse_action(part) for part in joined[1].split(";"))
            return Cell(members, joined[2])  # type: ignore[arg-type]
        return Cell((parse_action(text),))
    except ScheduleError:
        _refuse_item(text, call, rank, index)


def _refuse_item(item: object, call: Call, rank: int, index: int) -> NoReturn:
    raise ScheduleError(
        f"{item!r} (rank {rank}, cell {index}) is not an action", call=call, legal=_LEGAL
    )


def _call(name: str) -> Call:
    return Call(name, user_source())
