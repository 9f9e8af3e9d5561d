"""Page: a block of data in; one HTML file that needs no other, out. The live page asks for its data."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files

from piper.view.columns import packed

_MARK = re.compile(r"%\((icon|title|style|data|script)\)s")


def page(block: bytes, *, title: str) -> str:
    return _filled(f"Piper: {title}", packed(block))


def live_page() -> str:
    """Without data: the page listens to the server that it came from."""
    return _filled("Piper", "", icon='<link rel="icon" href="data:,">\n')


def _filled(title: str, data: str, *, icon: str = "") -> str:
    """The script and the style sheet are those that `make web` built from web/."""
    parts = {
        "icon": icon,  # else a browser would ask the server for one
        "title": escape(title),
        "style": _asset("report.css"),
        "data": data,
        "script": _asset("report.js"),
    }
    return _MARK.sub(lambda found: parts[found[1]], _asset("page.html"))


@cache
def _asset(name: str) -> str:
    return files("piper.view").joinpath("assets", name).read_text(encoding="utf-8")
