"""Read: a table that a user wrote (CSV, JSON, or rows from Python) in, a checked Table out."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import msgspec

from piper.errors import Call, ScheduleError, Source, user_source
from piper.files import excess, read_text
from piper.schedules.legality import check, check_form
from piper.schedules.table import Action, Cell, Kind, Table

VERSION: Literal[1] = 1  # of the JSON form

Item = str | Action | Cell | None
_KIND: dict[str, Kind] = {"F": "F", "B": "B", "I": "BI", "W": "BW"}
_NUMBER = r"[0-9]{1,9}"
_ACTION = re.compile(rf"(?:d({_NUMBER}):)?({_NUMBER})([FBIW])({_NUMBER})")
_JOINED = re.compile(r"\((.*)\)(OVERLAP_F_B|FUSED)")
# What Piper's compiler adds itself, from the graph: it may stand in a table, and is left out.
_COMMUNICATION = re.compile(
    rf"(?:d{_NUMBER}:)?{_NUMBER}"
    rf"(?:(?:SEND|RECV)_[FB]{_NUMBER}|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*)"
)
_LEGAL = "0F3, 0B3, 0I3, 0W3, (0F3;3B1)OVERLAP_F_B, (0F3;0B3)FUSED, d1:0F3"


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file that ends in .csv or .json."""
    file = os.fspath(path)
    name = os.path.basename(file)
    text = read_text(file, error=ScheduleError, call=_call("schedule"))
    if file.endswith(".json"):
        return parse_json(text, name=name, file=file)
    if file.endswith(".csv"):
        return parse_csv(text, name=name, file=file)
    raise ScheduleError(f"{file} is no table", call=_call("schedule"), legal="a .csv or .json file")


def parse_csv(text: str, *, name: str, file: str | None = None) -> Table:
    """A table of one line per rank, comma-separated; empty cells are idle time and left out."""
    lines = [
        (number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    sources = [Source(os.path.abspath(file), number) for number, _ in lines] if file else None
    return from_rows([line for _, line in lines], name=name, sources=sources)


_NUMBERS = ("num_ranks", "num_stages", "num_microbatches", "num_directions")


class _Form(msgspec.Struct):
    """The JSON form; what else `piper schedule --format json` writes is not read again."""

    rows: list[list[str | None]]
    name: str | None = None
    version: Literal[1] = VERSION
    num_ranks: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    num_directions: int | None = None
    placement: list[list[int]] | None = None


def parse_json(text: str, *, name: str, file: str | None = None) -> Table:
    """A table of JSON: `{"rows": [["0F0", "0B0"], ...]}`, or the list of rows alone."""
    path = os.path.abspath(file) if file else None
    legal = '{"name": "mine", "rows": [["0F0", "0B0"], ["1F0", "1B0"]]}'
    try:
        too_much = excess(text.encode())
        if too_much:
            raise ValueError(too_much)
        found = msgspec.json.decode(text, type=_Form | list[list[str | None]])
    except (ValueError, RecursionError) as error:
        at = re.search(r"byte (\d+)", str(error))
        line = text.encode().count(b"\n", 0, int(at[1])) + 1 if at else 1
        call = Call(f"table {name}", Source(path, line) if path else user_source())
        raise ScheduleError(f"not a table in JSON: {error}", call=call, legal=legal) from None
    form = found if isinstance(found, _Form) else _Form(found)
    lines = _lines_of_rows(text, len(form.rows))
    sources = [Source(path, line) for line in lines] if path else None
    table = from_rows(form.rows, name=form.name or name, sources=sources)
    found_in_rows = {
        **{what: getattr(table, what) for what in _NUMBERS},
        "placement": [list(ranks.values()) for ranks in table.placement()],
    }
    for what, value in found_in_rows.items():
        if getattr(form, what) not in (None, value):
            raise ScheduleError(
                f"{what} is {getattr(form, what)}, but the rows have {value}",
                call=Call(f"table {name}", Source(path, 1) if path else user_source()),
            )
    return table


def _lines_of_rows(text: str, num_rows: int) -> list[int]:
    """The line on which each row of a JSON table begins; `text` is known to be one."""
    key = re.search(r'"rows"\s*:', text) if text.lstrip().startswith("{") else None
    at = text.index("[", key.end() if key else 0) + 1
    decoder, lines = json.JSONDecoder(), []
    while (row := re.compile(r"[\s,]*(?=\[)").match(text, at)) is not None:
        lines.append(text.count("\n", 0, row.end()) + 1)
        _, at = decoder.raw_decode(text, row.end())
    return lines if len(lines) == num_rows else [1] * num_rows  # another "rows" came first


def from_rows(
    rows: Iterable[str | Iterable[Item]],
    *,
    name: str = "table",
    sources: Sequence[Source] | None = None,
) -> Table:
    """The checked table of these rows: strings such as "0F0,0F1,0B0", or actions one by one.

    There are as many stages as the highest one named, and as many microbatches as most stages run.
    """
    call = Call(f"table {name}", sources[0] if sources else user_source())
    if not name.isprintable() or not name:
        call = Call("table", call.source)
        raise ScheduleError(f"{name!r} is no name", call=call, legal="printable characters")
    cells: list[tuple[Cell, ...]] = []
    for rank, row in enumerate(_iterable(rows, call, "the table")):
        call = Call(f"table {name}", sources[rank] if sources else user_source())
        items = row.split(",") if isinstance(row, str) else _iterable(row, call, f"row {rank}")
        read = (_cell(item, call, rank, index) for index, item in enumerate(items))
        cells.append(tuple(cell for cell in read if cell is not None))
    call = Call(f"table {name}", sources[0] if sources else user_source())
    actions = [action for row in cells for cell in row for action in cell.actions]
    if not actions:
        raise ScheduleError("the table is empty", call=call, legal="one row per rank")
    directions = Counter(action.direction for action in actions)
    if set(directions) not in ({None}, {0, 1}):
        _refuse_directions(cells, directions, call.name, sources)
    if not any(action.kind == "F" for action in actions):
        raise ScheduleError("incomplete: no stage runs a forward", call=call, legal="0F0, ...")
    forwards = {(a.direction, a.stage, a.microbatch) for a in actions if a.kind == "F"}
    runs = Counter(Counter((direction, stage) for direction, stage, _ in forwards).values())
    table = Table(
        name,
        1 + max(action.stage for action in actions),
        max(runs, key=lambda num: (runs[num], num)) * len(directions),
        tuple(cells),
        len(directions),
    )
    return check(table, sources=sources)


def _refuse_directions(
    cells: Sequence[Sequence[Cell]],
    directions: Counter[int | None],
    name: str,
    sources: Sequence[Source] | None,
) -> NoReturn:
    """Point to an action whose direction is not like that of the others."""
    rare = directions[None] and 2 * directions[None] <= directions.total()
    odd = None if rare else max(d for d in directions if d is not None)
    rank, action = next(
        (rank, action)
        for rank, row in enumerate(cells)
        for cell in row
        for action in cell.actions
        if action.direction == odd
    )
    shown = ", ".join("none" if d is None else f"d{d}:" for d in sorted(directions, key=str))
    raise ScheduleError(
        f"the directions are {shown}; see {action} on rank {rank}",
        call=Call(name, sources[rank] if sources else user_source()),
        legal="no direction at all, or d0: and d1:",
    )


def parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if not match:
        raise ScheduleError(f"{text!r} is not an action", legal=_LEGAL)
    direction = None if match[1] is None else int(match[1])
    return Action(int(match[2]), _KIND[match[3]], int(match[4]), direction)


def _iterable(found: object, call: Call, what: str) -> Iterable[Any]:
    if not isinstance(found, Iterable) or isinstance(found, Mapping):
        raise ScheduleError(
            f"{what} is {found!r}", call=call, legal='rows such as ["0F0,0B0", "1F0,1B0"]'
        )
    return found


def _cell(item: Item, call: Call, rank: int, index: int) -> Cell | None:
    """A cell, or None for idle time and communication."""
    if isinstance(item, Action | Cell):
        cell = item if isinstance(item, Cell) else Cell((item,))
        check_form(cell, call, rank, index)
        return cell
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
