"""In place: the page of a report in; what a notebook has of it below a card, closed at first, out."""

from __future__ import annotations

from html import escape

_LARGEST = 3 << 20  # bytes, which every output of a notebook keeps
_HEIGHT = 640


def in_place(page: str) -> str:
    """In a frame that cannot reach the notebook; nothing of a page that is too large."""
    if len(page) >= _LARGEST:
        return ""
    return (
        "<details><summary>report</summary>"
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{_HEIGHT}px;border:0" '
        f'srcdoc="{escape(page)}"></iframe></details>'
    )
