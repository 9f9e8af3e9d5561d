"""Errors on the command line: an error and the options in; text that speaks of options, or JSON, out."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from piper.errors import PiperError, RunError, Source, is_users

_CALLED = re.compile(r"\b(?:lower|launch|parallel|piper\.train)\((\w+=[^()]*)\)")
_ASSIGNED = re.compile(
    r"""(?<![\w@\[,.])(?<!\w\()(\w+)=("[^"]*"|'[^']*'|[\w.:+-]*[\w+-]|\.\.\.)(?![\w=])"""
)
_MESH = re.compile(r"\w+=\d+(?: \w+=\d+)+")
_OPTIONS_FIRST = re.compile(rf"{_CALLED.pattern}|[a-z_]+=")
_OR_NONE = re.compile(r",? or None(?:: [^;]*)?$")
_AS_OPTION = {"checkpoint_every": "every"}  # Python's names of options that are called otherwise
_IN_FILE = {"evaluate=DATA": "validation(share) in the file"}


def tell(error: Exception, words: Sequence[str], arguments: argparse.Namespace | None) -> None:
    """Print it: on stderr, or with --json as one object on stdout.

    Under torchrun all ranks make the same mistake: one of each machine tells.
    """
    alike = not isinstance(error, RunError) and isinstance(error, PiperError)
    if alike and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if isinstance(error, PiperError) and arguments is not None:
        error = in_options(error, arguments)
    if "--json" in words or getattr(arguments, "json", False):
        try:
            print(json.dumps(_facts(error)), flush=True)
            return
        except OSError:  # stdout takes nothing, as on a full disk: stderr may
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, PiperError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        print(_own_text(error), file=sys.stderr)


def in_options(error: PiperError, arguments: argparse.Namespace) -> PiperError:
    """The same error in terms of the command line: `--dp 3`, where Python has `dp=3`.

    An error with a line of the user's is about that line, and stays as it is. In the message only what
    the command line said is put so; then, or where it begins with an option, what is legal as well.
    """
    if error.call is not None and error.call.source is not None:
        return error
    values = vars(arguments)
    given = {
        name: str(value)
        for name, value in values.items()
        if value is not None and value is not False
    }
    message = _spoken(error.message, given, values)
    details = [_spoken(line, given, values) for line in error.details]
    legal = error.legal
    if legal is not None and (message != error.message or _OPTIONS_FIRST.match(legal)):
        legal = _OR_NONE.sub("", _spoken(legal, None, values))
    error.reword(message, details, legal)
    return error


def _spoken(text: str, given: dict[str, str] | None, names: Collection[str]) -> str:
    """With options for assignments; those of a mesh, such as `pp=2 dp=1`, are none."""
    for python, file in _IN_FILE.items():
        text = text.replace(python, file)
    text = _CALLED.sub(lambda found: found[1], text)
    mesh = [found.span() for found in _MESH.finditer(text)]

    def option(found: re.Match[str]) -> str:
        name = _AS_OPTION.get(found[1], found[1])
        value = found[2].strip("\"'")
        if name not in names or any(a <= found.start() < b for a, b in mesh):
            return found[0]
        if given is not None and given.get(name) != value:
            return found[0]
        name = f"--{name.replace('_', '-')}"
        return name if value == "True" else f"{name} {value}"

    return _ASSIGNED.sub(option, text)


def _facts(error: Exception) -> dict[str, Any]:
    """For JSON: the class, the message, where, and what is legal; an event, as lines of train are."""
    if not isinstance(error, PiperError):
        source = _own_line(error)
        where = str(source[0]) if source else None
        return {
            "event": "error",
            "error": type(error).__name__,
            "message": _message(error),
            "where": where,
            "by": None,
            "requirement": None,
            "details": [],
            "legal": None,
        }
    call = error.call
    return {
        "event": "error",
        "error": type(error).__name__,
        "message": error.message,
        "where": None if call is None or call.source is None else str(call.source),
        "by": None if call is None else call.name,
        "requirement": error.requirement,
        "details": list(error.details),
        "legal": error.legal,
    }


def _own_text(error: Exception) -> str:
    """An error of the user's own code, with its line; anything else says how to see more."""
    message = f"{type(error).__name__}: {_message(error)}"
    found = _own_line(error)
    if found is None:
        return f"{message}\n  (--debug shows where)"
    return f"{found[0]}: {message}\n    {found[1]}"


def _message(error: Exception) -> str:
    """Without the place, which is told beside it."""
    return error.msg if isinstance(error, SyntaxError) and _own_line(error) else str(error)


def _own_line(error: Exception) -> tuple[Source, str] | None:
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        source = Source(os.path.abspath(error.filename), error.lineno or 0)
        return source, (error.text or "").strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            source = Source(os.path.abspath(frame.filename), frame.lineno or 0)
            return source, frame.line or ""
    return None
