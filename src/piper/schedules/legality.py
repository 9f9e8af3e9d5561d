"""Check: a table in; the same table out, or an error that shows where it cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NoReturn

from piper.errors import Call, ScheduleError, Source, user_source
from piper.schedules.action_costs import Costs
from piper.schedules.grid import grid
from piper.schedules.table import LETTER, Action, Cell, Kind, Table
from piper.schedules.timing import Progress, inputs, output, run

Sources = Sequence[Source] | None  # the line of each row, for a table from a file
Marks = dict[tuple[int, int], str]  # (rank, index of the cell) -> what is wrong there
_MOST_MARKS = 6
_HALVES: tuple[Kind, ...] = ("F", "BI", "BW")


def check(table: Table, *, sources: Sources = None) -> Table:
    """The table, if every action is there once, in a possible order, and no rank waits for ever.

    Requires:
        1. Every rank runs something; the stages are 0, 1, 2, ... in each direction, each on one rank.
        2. Every stage runs F and B, or F, BI and BW, once for each microbatch of its direction.
        3. An action comes after what it needs; an overlapped pair is a forward and a backward that
           do not need each other.
        4. No ranks wait for each other in a circle.
    """
    call = Call(f"table {table.name}", sources[0] if sources else user_source())
    if table.num_directions not in (1, 2):
        raise ScheduleError(f"{table.num_directions} directions", call=call, legal="1 or 2")
    for rank, row in enumerate(table.rows):
        for column, cell in enumerate(row):
            check_form(cell, call, rank, column)
    if not table.rows:
        raise ScheduleError("the table is empty", call=call, legal="one row per rank")
    _check_stages(table, sources)
    _check_complete(table, sources)
    _check_possible(table, sources)
    _check_ends(table, run(table, Costs()), sources)
    return table


def check_form(cell: Cell, call: Call, rank: int, column: int) -> None:
    """Raise unless a cell is made of actions with numbers that can be."""
    actions = cell.actions if isinstance(cell, Cell) else ()
    numbers = [n for a in actions for n in (a.stage, a.microbatch, a.direction or 0)]
    if (
        not actions
        or any(type(number) is not int or number < 0 for number in numbers)
        or any(action.kind not in LETTER for action in actions)
        or (cell.joined == "") != (len(actions) == 1)
        or cell.joined not in ("", "OVERLAP_F_B", "FUSED")
    ):
        raise ScheduleError(
            f"rank {rank}, cell {column} is no action and no group of actions: {cell!r}",
            call=call,
            legal='Cell((Action(0, "F", 0),)), with OVERLAP_F_B or FUSED for several',
        )


def _check_stages(table: Table, sources: Sources) -> None:
    for rank, row in enumerate(table.rows):
        if not row:
            what, marks = f"incomplete: rank {rank} runs nothing", {(rank, 0): "nothing"}
            _refuse(table, sources, what, 1, marks, "at least one stage a rank")
    counts: dict[tuple[int | None, int], Counter[int]] = {}
    for rank, _, action in _placed(table):
        counts.setdefault((action.direction, action.stage), Counter())[rank] += 1
    homes = {stage: ranks.most_common(1)[0][0] for stage, ranks in counts.items()}
    for rank, column, action in _placed(table):
        if action.direction not in _directions(table):
            what = f"impossible: {action} in a table of {table.num_directions} directions"
            marks = {(rank, column): "wrong direction"}
            _refuse(table, sources, what, 1, marks, "d0: and d1: where there are two directions")
        if action.stage >= table.num_stages:
            what = f"impossible: {action}, but there are {table.num_stages} stages"
            marks = {(rank, column): "no such stage"}
            _refuse(table, sources, what, 1, marks, f"stages 0 to {table.num_stages - 1}")
        home = homes[action.direction, action.stage]
        if home != rank:
            what = f"impossible: {action} is on rank {rank}, but rank {home} runs its stage"
            _refuse(
                table, sources, what, 1, {(rank, column): f"on rank {home}"}, "one rank a stage"
            )
    for direction in _directions(table):
        for stage in range(table.num_stages):
            if (direction, stage) not in homes:
                where = "" if direction is None else f" in direction {direction}"
                what = f"incomplete: no rank runs stage {stage}{where}"
                _refuse(table, sources, what, 1, {}, f"stages 0 to {table.num_stages - 1}")


def _check_complete(table: Table, sources: Sources) -> None:
    each, left = divmod(table.num_microbatches, table.num_directions)
    if left or not each:
        what = f"{table.num_microbatches} microbatches in {table.num_directions} directions"
        legal = "as many microbatches in each direction, at least 1"
        _refuse(table, sources, f"incomplete: {what}", 2, {}, legal)
    problems: list[tuple[str, tuple[int, int], str]] = []  # message, place, note
    seen: dict[Action, int] = {}
    for rank, column, action in _placed(table):
        if action.microbatch >= each:
            note = f"there is no microbatch {action.microbatch}"
            what = f"impossible: {action}, but {note} (0 to {each - 1})"
            problems.append((what, (rank, column), note))
            continue
        for half in _halves(action):
            if half in seen:
                what = f"duplicated: {action} repeats cell {seen[half]} of rank {rank}"
                problems.append((what, (rank, column), f"see cell {seen[half]}"))
                break
            seen[half] = column
    for direction, homes in zip(_directions(table), table.placement(), strict=True):
        for stage, rank in homes.items():
            for microbatch in range(each):
                for kind in _missing(seen, stage, microbatch, direction):
                    wanted = Action(stage, kind, microbatch, direction)
                    place = (rank, len(table.rows[rank]))
                    what = f"incomplete: rank {rank} never runs {wanted}"
                    problems.append((what, place, f"{wanted} is missing"))
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        marks: Marks = {}
        for _, place, note in problems:
            marks.setdefault(place, note)
        legal = f"each stage: F and B (or I and W) once for microbatches 0 to {each - 1}"
        _refuse(table, sources, problems[0][0] + more, 2, marks, legal)


def _check_possible(table: Table, sources: Sources) -> None:
    """Raise at the first action that comes before something its own rank runs later."""
    places = {
        output(action): (rank, column, index, action)
        for rank, row in enumerate(table.rows)
        for column, cell in enumerate(row)
        for index, action in enumerate(cell.actions)
    }
    for rank, row in enumerate(table.rows):
        for column, cell in enumerate(row):
            pair = cell.joined == "OVERLAP_F_B"
            if pair and sorted(a.kind for a in cell.actions) not in (["B", "F"], ["BI", "F"]):
                what = f"impossible: {cell} is not one forward and one backward"
                marks = {(rank, column): "not a pair"}
                _refuse(table, sources, what, 3, marks, "one F with one B or I in OVERLAP_F_B")
            for index, action in enumerate(cell.actions):
                for needed in inputs(action, table.num_stages):
                    home, at, within, name = places[needed]
                    if home != rank or (at, within) < (column, 0 if pair else index):
                        continue
                    how = "runs side by side with it" if at == column else "runs before it"
                    what = f"impossible: {action} needs {name}, but {how}"
                    marks = {(rank, column): f"needs {name}"}
                    _refuse(table, sources, what, 3, marks, f"{action} after {name}")


def _check_ends(table: Table, progress: Progress, sources: Sources) -> None:
    """Raise with a circle of waits if a replay came to a stop before its end."""
    if not progress.waits:
        return
    homes = table.placement()
    names = {output(action): action for action in table.actions()}
    rank, path = min(progress.waits), []
    while rank not in path:
        path.append(rank)
        needed = progress.waits[rank]
        rank = homes[needed.direction or 0][needed.stage]
    circle = path[path.index(rank) :]
    marks = {
        (rank, len(progress.ends[rank])): f"waits for {names[progress.waits[rank]]}"
        for rank in circle
    }
    around = " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]])
    what = f"deadlock: ranks wait for each other, {around}"
    _refuse(table, sources, what, 4, marks, "an order in which the awaited actions come first")


def _missing(
    seen: Mapping[Action, int], stage: int, microbatch: int, direction: int | None
) -> list[Kind]:
    kinds = [k for k in _HALVES if Action(stage, k, microbatch, direction) not in seen]
    return [*kinds[:-2], "B"] if kinds[-2:] == ["BI", "BW"] else kinds


def _directions(table: Table) -> Sequence[int | None]:
    return [None] if table.num_directions == 1 else range(table.num_directions)


def _halves(action: Action) -> list[Action]:
    """The action, or the two halves of a full backward."""
    if action.kind != "B":
        return [action]
    stage, microbatch, direction = action.stage, action.microbatch, action.direction
    return [Action(stage, "BI", microbatch, direction), Action(stage, "BW", microbatch, direction)]


def _placed(table: Table) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(table.rows):
        for column, cell in enumerate(row):
            for action in cell.actions:
                yield rank, column, action


def _refuse(
    table: Table, sources: Sources, what: str, requirement: int, marks: Marks, legal: str
) -> NoReturn:
    shown = dict(islice(marks.items(), _MOST_MARKS))
    first = next(iter(shown), (0, 0))[0]
    raise ScheduleError(
        what,
        call=Call(f"table {table.name}", sources[first] if sources else user_source()),
        requirement=requirement,
        details=grid(table, shown),
        legal=legal,
    )
