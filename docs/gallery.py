"""The gallery: the catalogue of schedules in; a page, and a picture of each, all to one scale, out."""

from __future__ import annotations

import re
from pathlib import Path

from piper.observe.pictures.svg import draw_svg
from piper.schedules import SCHEDULES, Costs, Replay, Table, describe, replay, schedule
from piper.schedules.table_timeline import table_timeline

RANKS, MICROBATCHES = 4, 8
SCALE = 48  # pixels for a forward of all layers of a rank
MESSAGE, EXCHANGE = 0.25, 0.5  # how long they take in the last columns, where that forward takes 1
FOLDER = "pictures/gallery"
TEMPLATE = Path(__file__).with_name("gallery.in.md")
# Pictures have a background of their own; where the reader prefers dark pages it is dark.
# Text beside bars is then light, and names inside of bars stay as they are.
DARK = """<style>@media (prefers-color-scheme: dark) {
svg > rect:first-of-type { fill: #1e2129 }
svg > text { fill: #d5d9e0 }
svg > path { stroke: #ffffff33 }
}</style>
"""


def for_both_modes(svg: str) -> str:
    """A picture that is readable on a light and on a dark page."""
    head, tag, rest = svg.partition("<title>")
    return f"{head}{DARK}{tag}{rest}"


def costs(table: Table, *, message: float = 0.0, exchange: float = 0.0) -> Costs:
    """Of a rank's layers, cut into its stages. A forward and a BI have one exchange of rows each; those
    of a pair go on beside the other member's computation."""
    parts = stages_of_equal_size(table)
    alone = (1 + exchange) / parts
    return Costs(F=alone, BI=alone, BW=1 / parts, FB=3 / parts, comm=message)


def stages_of_equal_size(table: Table) -> int:
    """How many of them a rank's layers are cut into: a second direction has a whole copy."""
    return table.stages_per_rank if table.num_directions == 1 else 1


def files(note: str) -> dict[str, str]:
    """The page and its pictures by their paths under docs/."""
    tables = {
        name: schedule(name, num_ranks=RANKS, num_microbatches=MICROBATCHES) for name in SCHEDULES
    }
    free, slow, rows_travel = (
        {name: replay(table, costs(table, **taken)) for name, table in tables.items()}
        for taken in ({}, {"message": MESSAGE}, {"exchange": EXCHANGE})
    )
    longest = max(each.makespan for each in free.values())
    drawn = {}
    for name, table in tables.items():
        title = f"{name}: {RANKS} ranks, {MICROBATCHES} microbatches"
        timeline = table_timeline(table, free[name])
        svg = draw_svg(timeline, title=title, begin=0.0, end=longest, scale=SCALE)
        drawn[_picture(name)] = for_both_modes(svg)
    page = TEMPLATE.read_text().format(
        note=note,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        to={name: f"[{name}](#{name})" for name in tables},
        full=2 * RANKS,
        message=MESSAGE,
        exchange=EXCHANGE,
        free=_steps(free),
        slow=_steps(slow),
        travel=_steps(rows_travel),
        bubble={name: f"{each.bubble_of_makespan:.0%}" for name, each in free.items()},
        held={name: f"{held(tables[name], each):g}" for name, each in free.items()},
        rows="\n".join(
            _row(name, table, free[name], slow[name], rows_travel[name])
            for name, table in tables.items()
        ),
        parts="\n".join(_part(name, _picture(name)) for name in tables),
    )
    return {"gallery.md": page, **drawn}


def _picture(name: str) -> str:
    return f"{FOLDER}/{name}.svg"


def _steps(replayed: dict[str, Replay]) -> dict[str, str]:
    return {name: f"{each.makespan:.4g}" for name, each in replayed.items()}


def held(table: Table, replayed: Replay) -> float:
    """The most microbatches that a rank holds, each counted with all the layers of a rank."""
    return max(replayed.peak_in_flight) / stages_of_equal_size(table)


def _row(name: str, table: Table, free: Replay, slow: Replay, rows_travel: Replay) -> str:
    return (
        f"| [{name}](#{name}) | {table.stages_per_rank} | {free.bubble_of_makespan:.1%} "
        f"| {free.bubble_of_span:.1%} | {held(table, free):g} | {table.num_directions} "
        f"| {free.makespan:.4g} | {slow.makespan:.4g} | {rows_travel.makespan:.4g} |"
    )


def _part(name: str, path: str) -> str:
    about = describe(name)
    command = f"piper schedule {name} --ranks {RANKS} --microbatches {MICROBATCHES}"
    picture = f"![{name} on {RANKS} ranks with {MICROBATCHES} microbatches]({path})"
    return (
        f"## {name}\n\n{about.summary} {about.trades}\n\n[{picture}]({path})\n\n"
        f"```console\n$ {command}\n```\n\nPublished: {_linked(about.published)}.\n"
    )


def _linked(published: str) -> str:
    """`GPipe, arXiv 1811.06965`, or a title and an address, as a link."""
    title, _, place = published.rpartition(", ")
    number = re.fullmatch(r"arXiv (\d+\.\d+)", place)
    if number:
        return f"[{published}](https://arxiv.org/abs/{number[1]})"
    return f"[{title}]({place})"
