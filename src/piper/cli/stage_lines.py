"""Stages: what a command does before its first result; a line on stderr when each is done."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator

_WORTH_A_LINE = 0.1  # seconds
_CLEAR = "\r\x1b[K"
INTERRUPTED = 130


@contextlib.contextmanager
def stage(arguments: argparse.Namespace, doing: str, done: str) -> Iterator[None]:
    """`tracing model.py ...` while it goes on, and `traced model.py in 1.2 s` after it.

    A terminal sees both. Other readers of stderr see what was done, if the command trains: its output
    is kept, and what took how long is asked for later. With --json, and of ranks of torchrun but the
    first, nobody sees either.
    """
    if not speaks(arguments):
        yield
        return
    begun, terminal = time.perf_counter(), sys.stderr.isatty()
    if terminal:
        print(_on_one_line(f"{doing} ..."), end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        if terminal:
            print(end=_CLEAR, file=sys.stderr, flush=True)
        raise
    seconds = time.perf_counter() - begun
    line = f"{done} in {seconds:.1f} s\n" if seconds >= _WORTH_A_LINE else ""
    print(f"{_CLEAR if terminal else ''}{line}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """While torch is imported: its extensions swallow a KeyboardInterrupt, and leave half a package."""
    before = signal.getsignal(signal.SIGINT)
    of_main = threading.current_thread() is threading.main_thread()
    if before is not signal.default_int_handler or not of_main:
        yield
        return

    def end(*_: object) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _on_one_line(text: str) -> str:
    """As much of it as a line of the terminal takes: what wraps cannot be cleared."""
    width = shutil.get_terminal_size().columns
    return text if len(text) < width else f"{text[: max(0, width - 4)]}..."


def remark(arguments: argparse.Namespace, text: str) -> None:
    """A line among those of the stages."""
    if speaks(arguments):
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """What the user may not have meant; also beside JSON."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)


def speaks(arguments: argparse.Namespace) -> bool:
    if arguments.json or os.environ.get("RANK", "0") != "0":
        return False
    return sys.stderr.isatty() or arguments.command == "train"
