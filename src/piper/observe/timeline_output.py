"""A timeline and a path in; a file of the form that its ending says, out."""

from __future__ import annotations

import os

from piper.errors import FileError
from piper.files import check_writable, write_bytes
from piper.observe.timeline import Timeline
from piper.observe.timeline_files import to_bytes, to_json

ENDINGS = {
    ".timeline": "compact",
    ".json": "JSON",
    ".svg": "a picture",
    ".pftrace": "for ui.perfetto.dev",
    ".chrome.json": "for chrome://tracing",
}


def save_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    write_bytes(path, _encoded(timeline, os.fspath(path)))


def check_output(path: str | os.PathLike[str]) -> None:
    """Before anything is measured."""
    if not os.fspath(path).endswith(tuple(ENDINGS)):
        legal = ", ".join(f"FILE{ending} ({what})" for ending, what in ENDINGS.items())
        raise FileError(f"what is {os.fspath(path)} to be?", legal=legal)
    check_writable(path)


def _encoded(timeline: Timeline, path: str) -> bytes:
    if path.endswith(".timeline"):
        return to_bytes(timeline)
    if path.endswith(".svg"):
        from piper.observe.pictures.svg import draw_svg

        return draw_svg(timeline).encode()
    if path.endswith(".pftrace"):
        from piper.observe.traces.perfetto_trace import to_perfetto

        return to_perfetto(timeline)
    if path.endswith(".chrome.json"):
        from piper.observe.traces.chrome_trace import to_chrome

        return to_chrome(timeline)
    return to_json(timeline)
