"""Grid: a table in, lines of text with a row per rank and carets under the marked cells out."""

from __future__ import annotations

from collections.abc import Mapping

from piper.schedules.table import Table

_AROUND = 6  # cells shown on each side of a mark
_MOST_RANKS = 16


def grid(table: Table, marks: Mapping[tuple[int, int], str]) -> list[str]:
    """The rows around the marked (rank, cell) places, each mark with its note below."""
    first = {rank: min(c for r, c in marks if r == rank) for rank in {r for r, _ in marks}}
    middle = min(first.values(), default=0)
    lines, left_out = [], 0
    for rank, row in enumerate(table.rows):
        if rank not in first and rank >= _MOST_RANKS:
            left_out += 1
            continue
        start = max(0, min(first.get(rank, middle) - _AROUND, len(row)))
        stop = start + 2 * _AROUND + 1
        head = f"rank {rank:<{len(str(table.num_ranks - 1))}} | "
        text, columns = head + ("... " if start else ""), {}
        for column, cell in enumerate(row[start:stop], start):
            columns[column] = len(text)
            text += f"{cell} "
        lines.append((text + ("..." if stop < len(row) else "")).rstrip())
        for (marked, column), note in sorted(marks.items()):
            if marked == rank and column in columns:
                width = len(str(row[column]))
                lines.append(" " * columns[column] + "^" * width + f" {note}")
            elif marked == rank and column >= len(row):
                lines.append(" " * len(text) + f"^ {note}")
    if left_out:
        lines.append(f"and {left_out} more ranks")
    return lines
