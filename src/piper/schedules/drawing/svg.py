"""SVG: a table and its replay in, a drawing in time out."""

from __future__ import annotations

from html import escape

from piper.schedules.drawing.picture import bars, styles_of, ticks
from piper.schedules.replay import Replay
from piper.schedules.table import Table

_ROW, _HEAD, _TOP = 26, 64, 52
_WIDEST = 20_000


def draw_svg(table: Table, replay: Replay) -> str:
    """One row per rank, time to the right, each bar with its action as label and tooltip."""
    found = list(bars(table, replay))
    lengths = [(7 * len(b.label) + 6) / (b.end - b.start) for b in found if b.end > b.start]
    scale = min(max(lengths, default=1.0), _WIDEST / (replay.makespan or 1.0))
    width = _HEAD + replay.makespan * scale + 12
    height = _TOP + _ROW * table.num_ranks + 28
    title = f"{table.name}: {table.num_ranks} ranks, {table.num_microbatches} microbatches"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    x = 8.0
    for style in styles_of(table):
        parts.append(f'<rect x="{x:.0f}" y="28" width="12" height="12" fill="{style.web}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="38">{style.meaning}</text>')
        x += 30 + 7 * len(style.meaning)
    for rank in range(table.num_ranks):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
    for bar in found:
        left, wide, y = (
            _HEAD + bar.start * scale,
            (bar.end - bar.start) * scale,
            _TOP + _ROW * bar.rank,
        )
        label = escape(bar.label)
        parts.append(
            f"<g><title>{label} from {bar.start:g} to {bar.end:g}</title>"
            f'<rect x="{left:.2f}" y="{y}" width="{max(wide - 1, 0):.2f}" height="{_ROW - 4}" '
            f'rx="2" fill="{bar.style.web}"/>'
        )
        if wide >= 7 * len(bar.label):
            parts.append(f'<text x="{left + 3:.2f}" y="{y + 15}">{label}</text>')
        parts.append("</g>")
    bottom = _TOP + _ROW * table.num_ranks
    for time in ticks(replay.makespan, about=max(int(replay.makespan * scale / 60), 1)):
        at = _HEAD + time * scale
        parts.append(f'<path d="M{at:.2f} {_TOP - 4}V{bottom}" stroke="#00000022"/>')
        parts.append(f'<text x="{at:.2f}" y="{bottom + 14}" fill="#555555">{time:g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
