"""Hooks of mkdocs: pages as GitHub reads them in, pages as mkdocs reads them out.

The contents get the pages of all directives and of all mistakes, in the order of their indices.

Links to files of the repository that are no pages become their words: there is nothing behind
`../tests/...` on the site. Inside of code a cell of a table has `|`, where GitHub wants `\\|`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")
ROW = re.compile(r"^\|.*$", re.M)
CODE = re.compile(r"`[^`]*`")
INDICES = ("directives/README.md", "mistakes/README.md")


def on_config(config: Any) -> None:
    for path in INDICES:
        index = (Path(config.docs_dir) / path).read_text()
        pages = re.findall(r"^\| \[([^\]]+)\]\((\w+\.md)\)", index, re.M)
        folder = posixpath.dirname(path)
        entries = _entries_with(path, config.nav)
        entries.extend({name: f"{folder}/{file}"} for name, file in pages)


def _entries_with(page: str, entries: list[Any]) -> list[Any]:
    """The part of the contents that lists a page."""
    if page in entries:
        return entries
    inner = [part for entry in entries if isinstance(entry, dict) for part in entry.values()]
    return next(
        (f for part in inner if isinstance(part, list) if (f := _entries_with(page, part))), []
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def words_or_link(match: re.Match[str]) -> str:
        leaves = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if leaves else match[0]

    def bare_pipes(row: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])

    return ROW.sub(bare_pipes, LINK.sub(words_or_link, markdown))
