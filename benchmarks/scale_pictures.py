"""Pictures of the study of scale: cases in, SVG out, in the colours of timelines."""

from __future__ import annotations

from html import escape
from typing import Any

from piper.observe.pictures.styles import MEMORY_COLORS, STYLES

Case = dict[str, Any]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, WORDS = 900, 380, 60, 44, 44, 230
_KINDS = (
    "F",
    "BI",
    "BW",
    "F&B",
    "all_to_all",
    "B",
    "update",
    "all_reduce",
    "all_gather",
    "send",
    "R",
    "reduce_scatter",
    "shift",
)
INK, GRID = "#5b6470", "#d5d9df"


def lines_svg(title: str, cases: list[Case], card: float) -> str:
    """MFU over the number of GPUs, a line per strategy; hollow where a rank needs more than a card."""
    sizes = sorted({case["gpus"] for case in cases})
    names = list(dict.fromkeys(case["name"] for case in cases))
    most = max(10, -(-max(case["mfu"] for case in cases) * 100 // 10) * 10)
    right, bottom = WIDTH - WORDS, HEIGHT - BOTTOM
    step = (right - LEFT - 40) / max(1, len(sizes) - 1)

    def at(case: Case) -> tuple[float, float]:
        x = LEFT + 20 + sizes.index(case["gpus"]) * step
        return x, bottom - (bottom - TOP) * case["mfu"] * 100 / most

    parts = _begun(title, HEIGHT)
    for percent in range(0, int(most) + 1, 10):
        y = bottom - (bottom - TOP) * percent / most
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for number, gpus in enumerate(sizes):
        parts.append(_text(LEFT + 20 + number * step, bottom + 20, f"{gpus:,} GPUs", "middle"))
    for number, name in enumerate(names):
        colour = STYLES[_KINDS[number % len(_KINDS)]].web
        mine = [case for case in cases if case["name"] == name]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, mine))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for case in mine:
            x, y = at(case)
            full = colour if case["bytes"] <= card else "#ffffff"
            tip = f"{name}, {case['gpus']:,} GPUs: {case['mfu']:.1%}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{full}" stroke="{colour}" '
                f'stroke-width="2"><title>{escape(tip)}</title></circle>'
            )
        y = TOP + 18 * number
        parts.append(f'<rect x="{right + 16}" y="{y - 9}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(right + 34, y, name))
    y = TOP + 18 * len(names) + 8
    parts.append(_text(right + 16, y, "hollow: more than 80 GB"))
    return "\n".join((*parts, "</svg>\n"))


def memory_svg(title: str, cases: list[Case], card: float) -> str:
    """A bar per strategy, of what its memory is for; the line is what a card has."""
    head, line = 190, 26
    height = TOP + line * len(cases) + 56
    most = max(card * 1.1, *(case["bytes"] for case in cases))
    scale = (WIDTH - head - 70) / most
    parts = _begun(title, height)
    for number, case in enumerate(cases):
        y, x = TOP + line * number, float(head)
        parts.append(_text(head - 8, y + 15, case["name"], anchor="end"))
        for what, nbytes in case["bytes_by_category"].items():
            if nbytes:
                tip = f"{case['name']}, {what}: {nbytes / 1e9:.1f} GB"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{nbytes * scale:.1f}" height="20" '
                    f'fill="{MEMORY_COLORS[what]}"><title>{escape(tip)}</title></rect>'
                )
                x += nbytes * scale
        parts.append(_text(x + 6, y + 15, f"{case['bytes'] / 1e9:.0f} GB"))
    x, end = head + card * scale, TOP + line * len(cases)
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{end}" stroke="{INK}" '
        'stroke-dasharray="4 3"/>'
    )
    parts.append(_text(x, TOP - 10, "80 GB", anchor="middle"))
    kinds = [
        what for what in MEMORY_COLORS if any(case["bytes_by_category"].get(what) for case in cases)
    ]
    for number, what in enumerate(kinds):
        left = head + 100 * number
        parts.append(
            f'<rect x="{left}" y="{end + 14}" width="11" height="11" fill="{MEMORY_COLORS[what]}"/>'
        )
        parts.append(_text(left + 16, end + 24, what))
    return "\n".join((*parts, "</svg>\n"))


def _begun(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="22" font-size="15" fill="#20242a">{escape(title)}</text>',
    ]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'
    )
