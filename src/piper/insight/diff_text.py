"""Diff text: what differs between two timelines in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.insight.step_text import show_seconds
from piper.insight.timeline_diff import RankRow, Row, TimelineDiff
from piper.ir.form.byte_sizes import show_size

_SHOWN = 10
_LEAST = 1e-9  # seconds that count as a difference
_LONGEST_NAME = 56


def diff_text(found: TimelineDiff) -> Iterator[str]:
    a, b = found.seconds
    yield f"step: {show_seconds(a)} -> {show_seconds(b)} ({_percent(a, b)})"
    yield from _table("kind", found.by_kind)
    yield from _table("directive", found.by_directive)
    yield from _table("task", found.by_task)
    yield from _table("body", found.by_body)
    yield from _ranks(found.by_rank)


def _table(title: str, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    changed = [row for row in rows if abs(row.difference) >= _LEAST or row.count[0] != row.count[1]]
    shown = changed[:_SHOWN]
    if not shown:
        yield f"by {title}: nothing differs"
        return
    cells = [_cells(row) for row in shown]
    wide = max((len(_short(row.name)) for row in shown), default=0)
    wide = max(wide, len(title) + 3)
    head = ("spans a step", "all ranks together", "difference", "median of one")
    widths = [max(len(h), *(len(c[i]) for c in cells)) for i, h in enumerate(head)]
    columns = "  ".join(f"{h:<{w}}" for h, w in zip(head, widths, strict=True))
    yield f"{'by ' + title:<{wide + 2}}  {columns}".rstrip()
    for row, cell in zip(shown, cells, strict=True):
        columns = "  ".join(f"{c:<{w}}" for c, w in zip(cell, widths, strict=True))
        yield f"  {_short(row.name):<{wide}}  {columns}".rstrip()
    if len(changed) > _SHOWN:
        yield f"  and {len(changed) - _SHOWN} more"


def _cells(row: Row) -> tuple[str, str, str, str]:
    sign = "+" if row.difference >= 0 else "-"
    return (
        _arrow(f"{row.count[0]:g}", f"{row.count[1]:g}"),
        _arrow(*map(show_seconds, row.total)),
        f"{sign}{show_seconds(abs(row.difference))}",
        _arrow(*map(show_seconds, row.usual)),
    )


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def _percent(a: float, b: float) -> str:
    return f"{(b / a - 1) * 100:+.1f} %" if a else "from nothing"


def _ranks(rows: Sequence[RankRow]) -> Iterator[str]:
    if not rows:
        return
    yield "by rank"
    for row in rows[:_SHOWN]:
        parts = [
            f"computes {_arrow(*map(show_seconds, row.computing))}",
            f"waits for communication {_arrow(*map(show_seconds, row.exposed))}",
            f"idle {_arrow(*map(show_seconds, row.idle))}",
        ]
        if any(row.peak):
            parts.append(f"memory {_arrow(*map(show_size, row.peak))}")
        yield f"  rank {row.rank}: {'; '.join(parts)}"
    if len(rows) > _SHOWN:
        yield f"  and {len(rows) - _SHOWN} more"
