"""Catalog: the schedules by name; a name, a file or a function and numbers in, a table out."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from piper.errors import Call, ScheduleError, Source, did_you_mean, is_users, user_source
from piper.schedules.generators.auto import auto
from piper.schedules.generators.dualpipe import dualpipe, dualpipev
from piper.schedules.generators.gpipe import gpipe, looped_bfs
from piper.schedules.generators.interleaved import interleaved_1f1b, interleaved_zb
from piper.schedules.generators.one_f_one_b import eager_1f1b, one_f_one_b
from piper.schedules.generators.request import refuse
from piper.schedules.generators.v_shaped import v_half, v_min, zbv
from piper.schedules.generators.zero_bubble import zb_h1, zb_h2
from piper.schedules.legality import check
from piper.schedules.read import Item, from_rows, read_table
from piper.schedules.table import Table

# A user's own: takes num_ranks and num_microbatches, maybe stages_per_rank; gives rows or a Table.
Generator = Callable[..., Table | Iterable[str | Iterable[Item]]]
Schedulable = str | os.PathLike[str] | Table | Generator

SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "auto": auto,
}

_LEGAL = (
    f"{', '.join(SCHEDULES)}; FILE.csv or FILE.json; in Python also a table or a function that gives "
    "rows, on the command line FILE.py:FUNCTION"
)


class Description(msgspec.Struct, frozen=True):
    """What a generator's docstring says."""

    summary: str
    placement: str
    bubble: str
    memory: str
    requires: str
    trades: str
    published: str


def describe(name: str) -> Description:
    text = inspect.getdoc(SCHEDULES[name]) or ""

    def line(key: str) -> str:
        found = re.search(rf"^{key}: (.*)$", text, re.M)
        return found[1] if found else ""

    keys = ("Placement", "Bubble", "Memory", "Requires", "Trades", "Published")
    return Description(text.splitlines()[0], *map(line, keys))


MAX_CELLS = 10_000_000


def takes_stages_per_rank(schedule: Schedulable) -> bool:
    """Whether the number of stages per rank can be chosen."""
    found = SCHEDULES.get(schedule) if isinstance(schedule, str) else schedule
    return callable(found) and "stages_per_rank" in inspect.signature(found).parameters


def takes_costs(schedule: Schedulable) -> bool:
    """Whether the table depends on what stages take."""
    found = SCHEDULES.get(schedule) if isinstance(schedule, str) else schedule
    return callable(found) and "costs" in inspect.signature(found).parameters


def is_file(name: str) -> bool:
    """Whether a name is that of a file with a table."""
    return name.endswith((".csv", ".json"))


def check_known(schedule: Schedulable) -> None:
    """Raise unless it is a name, a file of a known ending, a function or a table."""
    if isinstance(schedule, Table | os.PathLike) or callable(schedule):
        return
    if not isinstance(schedule, str):
        refuse(repr(schedule), "it is no schedule", legal=_LEGAL)
    if schedule not in SCHEDULES and not is_file(schedule):
        what = f"no schedule is called {schedule!r}{did_you_mean(schedule, list(SCHEDULES))}"
        refuse(schedule, what, legal=_LEGAL)


def schedule(
    name: Schedulable,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    **options: Any,
) -> Table:
    """The table of a schedule by name, of a .csv or .json file, or of a function that gives rows.

    `stages_per_rank` defaults to what the schedule usually has; `options` go to the generator.
    """
    check_known(name)
    if callable(name) or (isinstance(name, str) and name in SCHEDULES):
        if stages_per_rank is not None and takes_stages_per_rank(name):
            options["stages_per_rank"] = stages_per_rank
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        _check_size(name, sizes.values())
        if isinstance(name, str):
            _check_arguments(SCHEDULES[name], name, {**sizes, **options})
            table = SCHEDULES[name](**sizes, **options)
        else:
            table = _from_function(name, {**sizes, **options})
    elif options:
        refuse(str(name), f"it takes no {', '.join(options)}", legal="no options for a table")
    else:
        table = check(name) if isinstance(name, Table) else read_table(name)
    wanted = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    if stages_per_rank is not None:
        wanted["stages_per_rank"] = stages_per_rank
    for what, number in wanted.items():
        has = getattr(table, what)
        if has != number:
            refuse(
                table.name,
                f"{what} is {number}, but the table has {has}",
                legal=f"{what} of {has}",
            )
    return table


def _check_size(name: Schedulable, sizes: Iterable[Any]) -> None:
    """Before a generator makes rows; what is no number it refuses itself."""
    numbers = [size for size in sizes if isinstance(size, int)]
    if math.prod(numbers) > MAX_CELLS:
        what = f"{' ranks x '.join(map(str, numbers))} microbatches"
        refuse(str(name), what, legal=f"at most {MAX_CELLS} in all")


def _check_arguments(function: Generator, name: str, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        code = getattr(function, "__code__", None)
        source = _source(function) if code and is_users(code.co_filename) else user_source()
        raise ScheduleError(
            f"it is called with {', '.join(arguments)}: {error}",
            call=Call(f"schedule {name}", source),
            legal="def mine(*, num_ranks, num_microbatches): and maybe stages_per_rank",
        ) from None


def _from_function(function: Generator, arguments: Mapping[str, Any]) -> Table:
    name = getattr(function, "__name__", "table")
    _check_arguments(function, name, arguments)
    made = function(**arguments)
    if isinstance(made, Table):
        return check(made)
    source = _source(function)
    if isinstance(made, Iterable) and not isinstance(made, str):
        most = arguments["num_ranks"] + 1  # one too many is enough to refuse
        made = [row if isinstance(row, str) else list(row) for row in islice(made, most)]
        return from_rows(made, name=name, sources=[source] * len(made) if source else None)
    raise ScheduleError(
        f"it gives {made!r}", call=Call(f"schedule {name}", source), legal="rows of actions"
    )


def _source(function: Generator) -> Source | None:
    code = getattr(function, "__code__", None)
    return Source(code.co_filename, code.co_firstlineno) if code else None


def as_code(table: Table) -> str:
    """Python that makes the table again: by its name, or action by action."""
    possible = table.num_microbatches <= sum(map(len, table.rows))  # else it says so of itself only
    if possible and table.name in SCHEDULES and table.name != "auto":  # that is searched anew
        sizes = {"num_ranks": table.num_ranks, "num_microbatches": table.num_microbatches}
        if takes_stages_per_rank(table.name):
            sizes["stages_per_rank"] = table.stages_per_rank
        try:
            same = SCHEDULES[table.name](**sizes) == table
        except ScheduleError:
            same = False
        if same:
            numbers = ", ".join(f"{key}={value}" for key, value in sizes.items())
            return f"piper.schedules.schedule({table.name!r}, {numbers})"
    return f"piper.schedules.parse_csv({table.as_csv()!r}, name={table.name!r})"
