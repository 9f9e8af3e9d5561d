"""Catalog: the schedules by name; a name, a file or a function and numbers in, a table out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from piper.errors import ScheduleError, Source, did_you_mean
from piper.schedules.auto import auto
from piper.schedules.check import check
from piper.schedules.dualpipe import dualpipe, dualpipev
from piper.schedules.gpipe import gpipe, looped_bfs
from piper.schedules.interleaved import interleaved_1f1b, interleaved_zb
from piper.schedules.one_f_one_b import eager_1f1b, one_f_one_b
from piper.schedules.read import Item, from_rows, read_table
from piper.schedules.sizes import refuse, schedule_call
from piper.schedules.table import Table
from piper.schedules.v_shaped import v_half, v_min, zbv
from piper.schedules.zero_bubble import zb_h1, zb_h2

# A user's own: takes num_ranks and num_microbatches, maybe stages_per_rank; gives rows or a Table.
Generator = Callable[..., Table | Iterable[str | Iterable[Item]]]

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


class Description(msgspec.Struct, frozen=True):
    """What a generator's docstring says."""

    summary: str
    placement: str
    bubble: str
    memory: str
    requires: str


def describe(name: str) -> Description:
    text = inspect.getdoc(SCHEDULES[name]) or ""

    def line(key: str) -> str:
        found = re.search(rf"^{key}: (.*)$", text, re.M)
        return found[1] if found else ""

    keys = ("Placement", "Bubble", "Memory", "Requires")
    return Description(text.splitlines()[0], *map(line, keys))


def takes_stages_per_rank(generator: str | Generator | Table) -> bool:
    """Whether the number of stages per rank can be chosen."""
    function = SCHEDULES.get(generator) if isinstance(generator, str) else generator
    return callable(function) and "stages_per_rank" in inspect.signature(function).parameters


def schedule(
    name: str | Generator,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    **options: Any,
) -> Table:
    """The table of a schedule by name, of a .csv or .json file, or of a function that gives rows.

    `stages_per_rank` defaults to what the schedule usually has; `options` go to the generator.
    """
    if isinstance(name, str) and name.endswith((".csv", ".json")):
        table = read_table(name)
    elif isinstance(name, str) and name not in SCHEDULES:
        raise ScheduleError(
            f"no schedule is called {name!r}{did_you_mean(name, list(SCHEDULES))}",
            call=schedule_call(name),
            legal=f"{', '.join(SCHEDULES)}, FILE.csv or FILE.json",
        )
    else:
        if stages_per_rank is not None and takes_stages_per_rank(name):
            options["stages_per_rank"] = stages_per_rank
        generator = SCHEDULES[name] if isinstance(name, str) else name
        made = generator(num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
        table = made if isinstance(made, Table) else _from_function(generator, made)
        if not isinstance(name, str):
            check(table)
    wanted = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "stages_per_rank": stages_per_rank or table.stages_per_rank,
    }
    for what, number in wanted.items():
        if getattr(table, what) != number:
            refuse(
                table.name,
                f"{what} is {number}, but the table has {getattr(table, what)}",
                legal=f"{what} of {getattr(table, what)}",
            )
    return table


def _from_function(generator: Generator, rows: Iterable[str | Iterable[Item]]) -> Table:
    made = [row if isinstance(row, str) else list(row) for row in rows]
    code = getattr(generator, "__code__", None)
    source = Source(code.co_filename, code.co_firstlineno) if code else None
    name = getattr(generator, "__name__", "table")
    return from_rows(made, name=name, sources=[source] * len(made) if source else None)


def as_code(table: Table) -> str:
    """Python that makes the table again: by its name, or action by action."""
    if table.name in SCHEDULES and table.name != "auto":  # which is searched anew for other costs
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
