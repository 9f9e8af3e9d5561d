"""Page: a block of data in; one HTML file that needs no other, out."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files

from piper.view.columns import packed

_MARK = re.compile(r"%\((title|style|data|script)\)s")


def page(block: bytes, *, title: str) -> str:
    """The script and the style sheet are those that `make web` built from web/."""
    parts = {
        "title": f"Piper: {escape(title)}",
        "style": _asset("report.css"),
        "data": packed(block),
        "script": _asset("report.js"),
    }
    return _MARK.sub(lambda found: parts[found[1]], _asset("page.html"))


@cache
def _asset(name: str) -> str:
    return files("piper.view").joinpath("assets", name).read_text(encoding="utf-8")
