"""Text: a timeline in, a grid of characters in time out, with or without colour."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

from piper.observe.pictures.picture import Bar, Picture, picture, styles_of
from piper.observe.pictures.styles import Style, style_of
from piper.observe.timeline import Timeline

_WIDEST = 20_000  # characters for the whole time, before labels are left out
_NOISE = 1e-6  # of a character: what rounding of times may be
Line = list[tuple[str, Style | None]]


class _Canvas(NamedTuple):
    lines: list[Line]
    scale: float  # characters per unit of time
    band: int  # characters of a line, of which it may have several bands
    bars: list[Bar]
    note: str


def draw_text(
    timeline: Timeline,
    *,
    width: int = 100,
    color: bool = False,
    begin: float | None = None,
    end: float | None = None,
    ranks: Collection[int] | None = None,
) -> str:
    """One line per rank and stream, time to the right.

    A table's lines are cut into bands of the width, long enough for every name. A plan's lines have
    the width: a character that holds several spans shows the longest.
    """
    shown = picture(timeline, begin=begin, end=end, ranks=ranks)
    title = f"time {shown.unit.name}".rstrip()
    head = max([len(title), *map(len, shown.heads)]) + 1
    room = max(width - head, 20)
    canvas = (_in_full if shown.of_table else _fitted)(shown, room, color)
    total = len(canvas.lines[0]) if canvas.lines else 0
    text = []
    for left in range(0, total, canvas.band):
        right = min(left + canvas.band, total)
        if shown.steps:
            text.append("step".ljust(head) + _steps(shown, canvas.scale, left, right))
        text.append(title.ljust(head) + _ruler(shown, canvas.scale, left, right, total))
        for name, line in zip(shown.heads, canvas.lines, strict=True):
            text.append((name.ljust(head) + _colored(line[left:right], color)).rstrip())
        text.append("")
    if canvas.note:
        text.append(canvas.note)
    styles = styles_of({bar.label for bar in canvas.bars})
    if color:
        text.append("  ".join(_paint(f" {style.meaning} ", style) for style in styles))
    elif not shown.of_table:
        text.append("  ".join(f"{style.mark} {style.meaning}" for style in styles))
    return "\n".join(text).rstrip() + "\n"


def _in_full(shown: Picture, room: int, color: bool) -> _Canvas:
    """Every cell has its name, and a column between it and the next."""
    bars = list(shown.bars())
    scale = _scale(bars, shown.length)
    total = round(shown.length * scale)
    place = shown.place(scale)
    lines: list[Line] = [[(" ", None)] * total for _ in shown.heads]
    unlabelled = 0
    for bar in bars:
        left, right = round(place(bar.start)), round(place(bar.end))
        cell = min(max(right - left - 1, 1), total - left)  # the last column separates
        fits = len(bar.label.name) <= cell
        unlabelled += not fits
        text = (bar.label.name if fits else "#" * cell).ljust(cell, " " if color else "-")
        style = style_of(bar.label)
        lines[bar.row][left : left + cell] = [(char, style) for char in text]
    note = f"{unlabelled} of {len(bars)} labels do not fit (#); csv, json and svg have all"
    if scale < room:
        room -= room % max(round(scale), 1)  # do not cut a cell of length 1
    return _Canvas(lines, scale, room, bars, note if unlabelled else "")


def _fitted(shown: Picture, room: int, color: bool) -> _Canvas:
    """All of the time in the room. A bar that has none for its name is filled with its mark."""
    scale = room / (shown.length or 1.0)
    place = shown.place(scale)
    bars = sorted(shown.bars(1 / scale), key=lambda bar: bar.length)
    owners: list[list[Bar | None]] = [[None] * room for _ in shown.heads]
    for longer in bars:  # the longest last
        left = min(int(place(longer.start) + _NOISE), room - 1)
        right = min(max(math.ceil(place(longer.end) - _NOISE), left + 1), room)
        owners[longer.row][left:right] = [longer] * (right - left)
    lines = []
    for row in owners:
        line: Line = []
        for _, run in groupby(row, key=id):
            bar, *rest = run
            size = 1 + len(rest)
            name = shown.name(bar.label) if bar else ""
            if bar is None or len(name) > size:
                text = (style_of(bar.label).mark if bar else " ") * size
            else:
                text = name.ljust(size, " " if color else "-")
            line += [(char, style_of(bar.label) if bar else None) for char in text]
        lines.append(line)
    return _Canvas(lines, scale, room, bars, shown.rest)


def _scale(bars: list[Bar], length: float) -> float:
    """Characters per unit of time: enough for every label, unless that gets too wide."""
    wanted = [(len(bar.label.name) + 1) / bar.length for bar in bars if bar.length]
    return min(max(wanted, default=1.0), _WIDEST / length if length else 1.0)


def _ruler(shown: Picture, scale: float, left: int, right: int, total: int) -> str:
    times = shown.ticks(total / scale, about=max(total // 16, 1))
    marks = [(round((time - shown.begin) * scale), text) for time, text in times]
    return _marked(marks, left, right)


def _steps(shown: Picture, scale: float, left: int, right: int) -> str:
    place = shown.place(scale)
    return _marked([(int(place(begin)), f"|{step}") for step, begin in shown.steps], left, right)


def _marked(marks: list[tuple[int, str]], left: int, right: int) -> str:
    line = [" "] * (right - left)
    for place, text in marks:
        at = place - left
        if at >= 0 and at + len(text) <= len(line):
            line[at : at + len(text)] = text
    return "".join(line).rstrip()


def _colored(line: Line, color: bool) -> str:
    if not color:
        return "".join(char for char, _ in line)
    text, run, last = "", "", None
    for char, style in [*line, ("", None)]:
        if style is not last:
            text += _paint(run, last) if last else run
            run, last = "", style
        run += char
    return text + run


def _paint(text: str, style: Style) -> str:
    return f"\x1b[38;5;16;48;5;{style.terminal}m{text}\x1b[0m"
