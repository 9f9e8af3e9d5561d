"""SVG: a timeline in, a drawing in time out."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

from piper.observe.pictures.picture import Bar, Picture, number, picture, styles_of
from piper.observe.pictures.styles import Style, style_of
from piper.observe.timeline import Timeline

_ROW, _HEAD, _TOP, _LEGEND = 26, 64, 52, 1200
_WIDEST = 20_000
_FINEST = 0.2  # pixels, below which neighbours become one
_MOST_BARS = 20_000  # where all are that small


def draw_svg(
    timeline: Timeline,
    *,
    title: str = "",
    width: float = 1200,
    begin: float | None = None,
    end: float | None = None,
    ranks: Collection[int] | None = None,
    scale: float | None = None,
) -> str:
    """One row per rank and stream, time to the right, each bar with its name and a tooltip.

    A table is as wide as its names need, or has `scale` pixels for a unit of its time; a plan is as
    wide as it is told.
    """
    shown = picture(timeline, begin=begin, end=end, ranks=ranks)
    head = max([_HEAD, *(8 + 7 * len(name) for name in shown.heads)])
    bars, scale = _scaled(shown, max(width - head - 12, 100), scale)
    width = head + shown.length * scale + 12
    legend, top = _legend(styles_of({bar.label for bar in bars}), max(width, _LEGEND))
    bottom = top + _ROW * len(shown.heads)
    height = bottom + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
        *legend,
    ]
    for row, name in enumerate(shown.heads):
        parts.append(f'<text x="8" y="{top + _ROW * row + 16}">{escape(name)}</text>')
    place = shown.place(scale)
    for bar in bars:
        left, wide = head + place(bar.start), place(bar.end) - place(bar.start)
        parts.append(_drawn(shown, bar, left, wide, top + _ROW * bar.row))
    for time, text in shown.ticks(shown.length, about=max(int(shown.length * scale / 60), 1)):
        at = head + (time - shown.begin) * scale
        parts.append(f'<path d="M{at:.2f} {top - 4}V{bottom}" stroke="#00000022"/>')
        parts.append(f'<text x="{at:.2f}" y="{bottom + 14}" fill="#555555">{text}</text>')
    for step, time in shown.steps:
        at = head + place(time)
        parts.append(
            f'<path d="M{at:.2f} {top - 8}V{bottom}" stroke="#000000" stroke-dasharray="3"/>'
        )
        parts.append(f'<text x="{at + 3:.2f}" y="{top - 2}" font-size="9">step {step}</text>')
    if shown.unit.name:
        parts.append(f'<text x="8" y="{bottom + 14}" fill="#555555">{shown.unit.name}</text>')
    if shown.rest:
        parts.append(f'<text x="8" y="{bottom + 26}" fill="#555555">{shown.rest}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scaled(shown: Picture, room: float, scale: float | None) -> tuple[list[Bar], float]:
    """The bars, and pixels per unit of time."""
    if not shown.of_table:
        scale = room / (shown.length or 1.0)
        pixels = max(_FINEST, room * len(shown.heads) / _MOST_BARS)
        return list(shown.bars(pixels / scale)), scale
    bars = list(shown.bars())
    if scale is not None:
        return bars, scale
    lengths = [(7 * len(bar.label.name) + 6) / bar.length for bar in bars if bar.length]
    return bars, min(max(lengths, default=1.0), _WIDEST / (shown.length or 1.0))


def _legend(styles: list[Style], width: float) -> tuple[list[str], int]:
    """Its lines, and where the rows begin below it."""
    parts, x, y = [], 8.0, 28
    for style in styles:
        needed = 30 + 7 * len(style.meaning)
        if x > 8 and x + needed > width:
            x, y = 8.0, y + 16
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{style.web}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y + 10}">{style.meaning}</text>')
        x += needed
    return parts, _TOP + y - 28


def _drawn(shown: Picture, bar: Bar, left: float, wide: float, y: int) -> str:
    name = shown.name(bar.label)
    least = 0.0 if shown.of_table else 1.0  # what a gap to the next bar may not take
    text = (
        f"<g><title>{escape(_tooltip(shown, bar))}</title>"
        f'<rect x="{left:.2f}" y="{y}" width="{max(wide - 1, min(wide, least)):.2f}" '
        f'height="{_ROW - 4}" rx="2" fill="{style_of(bar.label).web}"/>'
    )
    if wide >= 7 * len(name):
        text += f'\n<text x="{left + 3:.2f}" y="{y + 15}">{escape(name)}</text>'
    return text + "\n</g>"


def _tooltip(shown: Picture, bar: Bar) -> str:
    unit, label = shown.unit, bar.label
    times = " to ".join(number(time * unit.per_second) for time in (bar.start, bar.end))
    if shown.of_table:
        return f"{label.name} from {bar.start:g} to {bar.end:g}"
    text = f"{label.name} from {times} {unit.name}"
    if bar.spans > 1:
        text = f"{bar.spans} spans from {times} {unit.name}, the longest {label.name}"
    if label.nbytes:
        text += f", {label.nbytes:,} bytes"
    return f"{text}; {shown.timeline.origin(label)}"
