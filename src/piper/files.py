"""Files: a path of the user's in; checked bytes or text, or the module that is made of it, out."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

from piper.errors import Call, FileError, PiperError, nearest, user_source

PREFIX = "piper_file_"
MEBIBYTE = 1 << 20
PLAN_LIMIT = 256 * MEBIBYTE  # of files that Piper wrote
TEXT_LIMIT = 16 * MEBIBYTE  # of files that a person could have written
DEPTH = 64  # brackets within brackets; a plan has 7
INT64 = 2**63

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_INTEGER = re.compile(rb"(?<![\d.eE+])\d{19,}(?![\d.eE])")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_path(given: Any, name: str) -> None:
    """Raise, with the user's line that calls `name`, unless a file or folder can have this path."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path:
        raise FileError(
            f"{given!r} is no path",
            call=Call(name, user_source()),
            legal='a text, such as "runs/first", or a pathlib.Path',
        )


def read_bytes(
    path: str | os.PathLike[str],
    *,
    limit: int,
    error: type[PiperError] = FileError,
    call: Call | None = None,
    legal: str | None = None,
) -> bytes:
    """What a regular file of at most `limit` bytes holds.

    A pipe, a socket, a device or a folder is refused at once: reading it might never end.
    """
    return _read(path, limit + 1, limit, error, call, legal)[0]


def read_start(path: str | os.PathLike[str], num: int) -> tuple[bytes, int]:
    """The first bytes of a regular file of any size, and that size."""
    return _read(path, num, None, FileError, None, None)


def _read(
    path: str | os.PathLike[str],
    num: int,
    limit: int | None,
    error: type[PiperError],
    call: Call | None,
    legal: str | None,
) -> tuple[bytes, int]:
    """The first bytes of a file, and its size, which must be within the limit, if there is one."""

    def refuse(reason: str, legal: str | None) -> PiperError:
        return error(f"{os.fspath(path)} cannot be read: {reason}", call=call, legal=legal)

    if "\0" in os.fspath(path):
        raise refuse("its name holds a null byte", legal)
    too_long = f"it has more than {(limit or 0) // MEBIBYTE} MiB"
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise refuse(f"it is {_kind(about.st_mode)}", "a regular file")
        if limit is not None and about.st_size > limit:
            raise refuse(too_long, "a smaller file")
        with open(path, "rb", opener=_without_waiting) as file:
            data = file.read(num) or b""
    except FileNotFoundError:
        message = f"there is no file {os.fspath(path)}{near_file(path)}"
        raise error(message, call=call, legal=legal) from None
    except OSError as problem:
        raise refuse(problem.strerror or str(problem), legal) from None
    if limit is not None and len(data) > limit:
        raise refuse(too_long, "a smaller file")
    return data, about.st_size


def near_file(path: str | os.PathLike[str], ending: str = "") -> str:
    """` (did you mean 'plan.json'?)`, or nothing: a file of the same folder, by its name without the
    ending, which may be said."""
    folder, name = os.path.split(os.fspath(path))
    try:
        beside = sorted(os.listdir(folder or "."))
    except OSError:
        return ""
    stems: dict[str, str] = {}
    for each in beside:
        if each.endswith(ending):
            stems.setdefault(os.path.splitext(each)[0], each)
    found = nearest(os.path.splitext(name)[0], list(stems))
    return f" (did you mean {os.path.join(folder, stems[found])!r}?)" if found else ""


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file even if it has become a pipe since it was looked at."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(
    path: str | os.PathLike[str],
    *,
    error: type[PiperError] = FileError,
    call: Call | None = None,
    legal: str | None = None,
) -> str:
    """The text of a file that a person may have written; a byte order mark is left out."""
    data = read_bytes(path, limit=TEXT_LIMIT, error=error, call=call, legal=legal)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        message = f"{os.fspath(path)} cannot be read: it is not text"
        raise error(message, call=call, legal="UTF-8") from None


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        raise FileError(f"{os.fspath(path)} cannot be written: {reason or problem}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise if no file can be written there, before what is to be in it takes time to come by."""
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        reason = f"there is no such folder as {folder}"
    elif os.path.exists(path) and not os.path.isfile(path):
        reason = f"it is {_kind(os.stat(path).st_mode)}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        reason = "permission is denied"
    else:
        return
    raise FileError(f"{path} cannot be written: {reason}", legal="another file")


def excess(data: bytes) -> str:
    """Why JSON must not be decoded: what it nests too deeply or counts too far; '' if it may be."""
    bare = _STRING.sub(b'""', data)
    brackets = bare.translate(None, delete=_NO_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > DEPTH:
        return f"brackets nest more than {DEPTH} deep"
    for number in _INTEGER.finditer(bare):
        if len(number[0]) > 19 or int(number[0]) >= INT64:
            return f"the number {_shortened(number[0].decode())} is no 64-bit integer"
    return ""


def _shortened(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}... of {len(text)} digits"


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "no regular file")


def module_of(path: str) -> ModuleType:
    """Import a Python file under a name of its own, so that it hides no module of the same name.

    Its folder is searched for what it imports.
    """
    stem, _ = os.path.splitext(os.path.basename(path))
    name = PREFIX + stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
