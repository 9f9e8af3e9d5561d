"""A screen: lines of any number and length in, a text that fits one out."""

from __future__ import annotations

from collections.abc import Sequence

LINES, COLUMNS = 20, 100


def on_a_screen(lines: Sequence[str], *, more: str = "") -> str:
    """The first lines, cut where they are too long; then how many are left, and what has them all."""
    kept = list(lines)
    if len(kept) > LINES or any(len(line) > COLUMNS for line in kept):
        kept = kept[: LINES - 1] if len(kept) > LINES - 1 else kept
        left = len(lines) - len(kept)
        end = f"... and {left} more lines" if left else "..."
        kept.append(f"{end}: {more}" if more else end)
    return "\n".join(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in kept)


def listed(names: Sequence[str], *, indent: str = "  ") -> list[str]:
    """Names in lines as wide as a screen."""
    lines = [indent]
    for name in names:
        if len(lines[-1]) + len(name) + 1 > COLUMNS and lines[-1].strip():
            lines.append(indent)
        lines[-1] += name if lines[-1] == indent else f" {name}"
    return lines if names else []
