"""The gallery: the catalogue of schedules in; a page, and a picture of each at the same size, out."""

from __future__ import annotations

import re
from pathlib import Path

from piper.schedules import SCHEDULES, Replay, Table, describe, draw_svg, replay, schedule

RANKS, MICROBATCHES = 4, 8
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


def files(note: str) -> dict[str, str]:
    """The page and its pictures by their paths under docs/."""
    rows, parts, drawn = [], [], {}
    for name in SCHEDULES:
        table = schedule(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
        replayed = replay(table)
        path = f"{FOLDER}/{name}.svg"
        drawn[path] = for_both_modes(draw_svg(table, replayed))
        rows.append(_row(name, table, replayed))
        parts.append(_part(name, path))
    page = TEMPLATE.read_text().format(
        note=note,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        rows="\n".join(rows),
        parts="\n".join(parts),
    )
    return {"gallery.md": page, **drawn}


def held(table: Table, replayed: Replay) -> float:
    """The most microbatches that a rank holds, each counted with all the layers of a rank."""
    per_rank = table.stages_per_rank if table.num_directions == 1 else 1
    return max(replayed.peak_in_flight) / per_rank


def _row(name: str, table: Table, replayed: Replay) -> str:
    return (
        f"| [{name}](#{name}) | {table.stages_per_rank} | {replayed.bubble_of_makespan:.1%} "
        f"| {replayed.bubble_of_span:.1%} | {held(table, replayed):g} | {table.num_directions} |"
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
