"""A card: what is said of an object in; a few lines of HTML for a notebook out."""

from __future__ import annotations

from html import escape


def card(head: str, *parts: str) -> str:
    """A line of text above parts that are HTML."""
    return f"<div><b>{escape(head)}</b>{''.join(parts)}</div>"


def text_card(text: str) -> str:
    """Of a repr, whose first line says what it is."""
    head, _, rest = text.partition("\n")
    return card(head, f"<pre>{escape(rest)}</pre>" if rest else "")
