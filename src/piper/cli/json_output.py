"""JSON of a command: facts in; one object a line on stdout out, where no code of the user's prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any


@dataclass
class _Kept:
    """Our stdout; and where descriptor 1, which other processes inherit, led before it led to stderr."""

    out: IO[str]
    before: int | None = None


_kept: _Kept | None = None


@contextlib.contextmanager
def only_json(asked: bool) -> Iterator[None]:
    """While a command runs with --json: what anything else prints, here or in a process that is started
    from here, goes to stderr."""
    global _kept
    if not asked:
        yield
        return
    _kept = _kept_apart(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        give_back()


def give_back() -> None:
    """End this before another program takes this process's place, or speaks for it."""
    global _kept
    kept, _kept = _kept, None
    if kept is None or kept.before is None:
        return
    try:
        kept.out.flush()
    finally:
        os.dup2(kept.before, 1)
        os.close(kept.before)
        with contextlib.suppress(OSError):  # what could not be flushed was told above
            kept.out.close()


def put(facts: Any) -> None:
    """Print facts as a line of JSON."""
    print(json.dumps(facts), file=own_stdout(), flush=True)


def own_stdout() -> IO[str]:
    """Where the command's own results go."""
    return sys.stdout if _kept is None else _kept.out


def _kept_apart(out: IO[str]) -> _Kept:
    try:
        own, elsewhere = out.fileno(), sys.stderr.fileno()
    except (OSError, io.UnsupportedOperation):  # it is no file, as in a notebook
        return _Kept(out)
    out.flush()
    kept = _Kept(
        os.fdopen(os.dup(own), "w", encoding=getattr(out, "encoding", None)), before=os.dup(1)
    )
    os.dup2(elsewhere, 1)
    return kept
