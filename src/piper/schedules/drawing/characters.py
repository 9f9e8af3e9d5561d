"""Text: a table and its replay in, a grid of characters in time out, with or without colour."""

from __future__ import annotations

from piper.schedules.drawing.picture import Bar, Style, bars, styles_of, ticks
from piper.schedules.replay import Replay
from piper.schedules.table import Table

_WIDEST = 20_000  # characters for the whole time, before labels are left out


def draw_text(table: Table, replay: Replay, *, width: int = 100, color: bool = False) -> str:
    """One line per rank, time to the right, in bands that fit the width."""
    found = list(bars(table, replay))
    scale = _scale(found, replay.makespan)
    total = round(replay.makespan * scale)
    lines: list[list[tuple[str, Style | None]]] = [
        [(" ", None)] * total for _ in range(table.num_ranks)
    ]
    unlabelled = 0
    for bar in found:
        left, right = round(bar.start * scale), round(bar.end * scale)
        room = min(max(right - left - 1, 1), total - left)  # the last column separates
        fits = len(bar.label) <= room
        unlabelled += not fits
        text = (bar.label if fits else "#" * room).ljust(room, " " if color else "-")
        lines[bar.rank][left : left + room] = [(char, bar.style) for char in text]
    head = len(f"rank {table.num_ranks - 1} ")
    band = max(width - head, 20)
    band -= band % max(round(scale), 1) if scale < band else 0  # do not cut a cell of length 1
    shown = []
    for left in range(0, total, band):
        shown.append("time".ljust(head) + _ruler(scale, left, min(left + band, total), total))
        for rank, line in enumerate(lines):
            row = f"rank {rank}".ljust(head) + _colored(line[left : left + band], color)
            shown.append(row.rstrip())
        shown.append("")
    if unlabelled:
        shown.append(
            f"{unlabelled} of {len(found)} labels do not fit (#); csv, json and svg have all"
        )
    if color:
        shown.append("  ".join(_paint(f" {s.meaning} ", s) for s in styles_of(table)))
    return "\n".join(shown).rstrip() + "\n"


def _scale(found: list[Bar], makespan: float) -> float:
    """Characters per unit of time: enough for every label, unless that gets too wide."""
    wanted = [(len(bar.label) + 1) / (bar.end - bar.start) for bar in found if bar.end > bar.start]
    return min(max(wanted, default=1.0), _WIDEST / makespan if makespan else 1.0)


def _ruler(scale: float, left: int, right: int, total: int) -> str:
    line = [" "] * (right - left)
    for time in ticks(total / scale, about=max(total // 16, 1)):
        at, text = round(time * scale) - left, f"{time:g}"
        if at >= 0 and at + len(text) <= len(line):
            line[at : at + len(text)] = text
    return "".join(line).rstrip()


def _colored(line: list[tuple[str, Style | None]], color: bool) -> str:
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
