"""Timelines on the command line: a path in, by whose ending a timeline is written; and its text."""

from __future__ import annotations

from pathlib import Path

from piper.errors import FileError
from piper.observe.timeline import Timeline

ENDINGS = {
    ".timeline": "compact",
    ".json": "JSON",
    ".svg": "a picture",
    ".pftrace": "for ui.perfetto.dev",
    ".chrome.json": "for chrome://tracing",
}


def write_timeline(timeline: Timeline, path: str) -> None:
    from piper.observe.timeline_files import save_timeline

    if path.endswith((".timeline", ".json")) and not path.endswith(".chrome.json"):
        save_timeline(timeline, path)
        return
    Path(path).write_bytes(_picture(timeline, path))


def check_ending(path: str) -> None:
    """Before anything is measured."""
    if not path.endswith(tuple(ENDINGS)):
        legal = ", ".join(f"FILE{ending} ({what})" for ending, what in ENDINGS.items())
        raise FileError(f"what is {path} to be?", legal=legal)


def _picture(timeline: Timeline, path: str) -> bytes:
    if path.endswith(".svg"):
        from piper.observe.pictures.svg import draw_svg

        return draw_svg(timeline).encode()
    if path.endswith(".pftrace"):
        from piper.observe.traces.perfetto_trace import to_perfetto

        return to_perfetto(timeline)
    from piper.observe.traces.chrome_trace import to_chrome

    return to_chrome(timeline)
