"""Verdicts on files: what a command did with one in; accepted, refused by one error, or Failed out."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from piper import errors
from piper.errors import PiperError

MISUSED = 2
PIPER_ERRORS = {
    name
    for name, known in vars(errors).items()
    if isinstance(known, type) and issubclass(known, PiperError)
}


class Failed(AssertionError):
    """A file that ended otherwise than it must."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str
    error: str


def ended(function: Callable[[], int]) -> Ended:
    """Run as the command line does; only what it prints and its exit code count."""
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            code = function()
        except PiperError as raised:
            code = MISUSED
            print(f"{type(raised).__name__}: {raised}", file=sys.stderr)
    return Ended(code, output.getvalue(), error.getvalue())


def accepted(what: Ended, *, legal: tuple[int, ...] = (0,)) -> bool:
    """Whether a file was accepted; raises if it was neither accepted nor refused by one error."""
    if what.code in legal:
        return True
    name = re.match(r"(\w+): ", what.error)
    if what.code != MISUSED or name is None or name[1] not in PIPER_ERRORS:
        raise Failed(f"exit code {what.code}\n{what.error}{what.output[:500]}")
    if "Traceback" in what.error or "--debug shows where" in what.error:
        raise Failed(what.error)
    return False
