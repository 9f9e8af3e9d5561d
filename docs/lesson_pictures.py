"""Pictures of the lessons: saved timelines, tables, and what scripts printed in; SVG out."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import inf, isinf
from pathlib import Path
from typing import Any

from piper.api.job import Job
from piper.files import module_of
from piper.observe.pictures.styles import MEMORY_COLORS
from piper.observe.pictures.svg import draw_svg
from piper.observe.timeline import Timeline, Track
from piper.observe.timeline_files import load_timeline
from piper.schedules import replay, schedule
from piper.schedules.catalog import Schedulable
from piper.schedules.table_timeline import table_timeline

DOCS = Path(__file__).parent
SCRIPTS = DOCS.parent / "examples" / "lessons"
FOLDER = "pictures/lessons"
PRINTED = "printed.txt"  # what a script said, beside its timelines
gallery = module_of(str(DOCS / "gallery.py"))


@dataclass(frozen=True)
class Window:
    """Which part of a timeline is drawn: from when to when, in milliseconds, and what is on tracks."""

    begin: float
    end: float
    tracks: tuple[int, ...]
    kinds: tuple[str, ...] = ("run",)


DRAWN = {
    "06_overlap": {
        name: Window(300, 340, (1,), ("run", "all_to_all"))
        for name in ("1f1b", "dualpipev", "backward_first")
    },
    "07_tensor_parallelism": {
        name: Window(40, 80, (0,), ("run", "all_reduce")) for name in ("in_a_node", "over_nodes")
    },
    "08_remove_a_bubble": {
        name: Window(0, 85, (0, 1, 2, 3)) for name in ("before", "balanced", "after")
    },
}


def pictures(name: str, folder: Path) -> dict[str, str]:
    """What a page draws, by paths under docs/."""
    found = dict(_of_timelines(name, folder))
    if name == "01_first_plan":
        window = Window(0, inf, (0, 1), ("run", "send", "recv"))
        found["plan"] = _of_plan(_ran(name)["job"], "two ranks, two microbatches", window)
    if name == "02_first_schedule":
        found |= {made: _of_table(made, 4, 6) for made in ("gpipe", "1f1b")}
    if name == "03_your_own_schedule":
        ran = _ran(name)
        found |= {made: _of_table(ran[made], 3, 3) for made in ("one_by_one", "warmed_up")}
    if name == "04_zero_under_a_pipeline":
        found["memory"] = memory_svg((folder / PRINTED).read_text())
    if name == "05_experts":
        window = Window(0, 0.4, (0,), ("run", "all_to_all"))
        found["rows"] = _of_plan(_ran(name)["jobs"]["shared out"], "a rank's first blocks", window)
    return {
        f"{FOLDER}/{name}_{title}.svg": gallery.for_both_modes(svg) for title, svg in found.items()
    }


def _of_timelines(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    for title, window in DRAWN.get(name, {}).items():
        drawn = only(load_timeline(str(folder / f"{title}.timeline")), window)
        yield title, draw_svg(drawn, title=title, begin=window.begin * 1e-3, end=window.end * 1e-3)


def only(timeline: Timeline, window: Window) -> Timeline:
    """What a window shows."""
    kept = []
    for number in window.tracks:
        track = timeline.tracks[number]
        chosen = [
            i
            for i in range(len(track))
            if track[i].label.kind in window.kinds
            and track.start[i] < window.end * 1e-3
            and track.end[i] > window.begin * 1e-3
        ]
        part = Track(track.name, track.ranks, track.labels, begins=[0])
        for i in chosen:
            part.add(track.which[i], track.issued[i], track.start[i], track.end[i])
        kept.append(part)
    return Timeline(timeline.source, kept, timeline.steps[:1], timeline.directives)


def _ran(name: str) -> dict[str, Any]:
    """What the names of a script mean after it ran."""
    path = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return runpy.run_path(str(SCRIPTS / f"{name}.py"))
    finally:
        sys.path[:] = path


def _of_plan(job: Job, title: str, window: Window) -> str:
    """A simulated step of a plan, or its beginning."""
    timeline = only(job.simulate("h100", steps=1), window)
    end = None if isinf(window.end) else window.end * 1e-3
    return draw_svg(timeline, title=f"{title}, simulated", width=900, end=end)


def _of_table(made: Schedulable, ranks: int, microbatches: int) -> str:
    table = schedule(made, num_ranks=ranks, num_microbatches=microbatches)
    title = f"{table.name}: {ranks} ranks, {microbatches} microbatches"
    return draw_svg(table_timeline(table, replay(table)), title=title, scale=36)


def memory_svg(printed: str) -> str:
    """The table of bytes that the fourth lesson prints, a bar per line."""
    head, *lines = (line.split() for line in printed.partition("\n\n")[0].splitlines())
    kinds = head[head.index("0") + 1 : head.index("in")]
    rows = [(line[0], dict(zip(kinds, map(float, line[1:]), strict=False))) for line in lines]
    wide, left, line_height, top = 760, 80, 28, 44
    scale = (wide - left - 80) / max(sum(by_kind.values()) for _, by_kind in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{top + 28 * len(rows)}" '
        f'viewBox="0 0 {wide} {top + 28 * len(rows)}" font-family="monospace" font-size="12">',
        "<title>MiB on rank 0 by what they are for</title>",
        f'<rect width="{wide}" height="{top + line_height * len(rows)}" fill="#ffffff"/>',
    ]
    for number, kind in enumerate(kinds):
        x = left + 130 * number
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{MEMORY_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="24">{escape(kind)}</text>')
    for number, (name, by_kind) in enumerate(rows):
        x, y = float(left), top + line_height * number
        parts.append(f'<text x="8" y="{y + 15}">{escape(name)}</text>')
        for kind, mib in by_kind.items():
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{mib * scale:.1f}" height="20" '
                f'fill="{MEMORY_COLORS[kind]}"><title>{kind}: {mib:g} MiB</title></rect>'
            )
            x += mib * scale
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(by_kind.values()):.0f} MiB</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
