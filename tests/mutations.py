"""Mutations: the bytes of a good file and a random generator in, the bytes of a damaged one out."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Path = list[Any]  # keys and indexes from the root of a JSON document to one of its values

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 64, 255, 4096, 10**6, 2**31, 10**9, 10**12, 2**62, 2**63 - 1, -(2**63),
    2**63, 10**30, 10**400, 0.5, -1.5, 1e300, -0.0,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "0", "F", "\x00", "\ud800", "é" * 40, "[" * 90, "a" * 5000,
    "__import__('os').system('true')", "torch.load", [], {}, [[]], [None], [0], [-1], ["x"],
    {"x": 0}, {"": []}, {"$": ["node", 0]}, [1, 2, 3, 4, 5, 6, 7, 8, 9],
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\n", b"null", b"NaN", b"1e999", b"-",
    b"\xff", b"\x00", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 30, b"[" * 200,
    b'{"a":' * 200,
)  # fmt: skip


def mutate(data: bytes, rng: Random) -> bytes:
    """One to three mutations; of JSON, mostly of its values."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if document is not None and rng.random() < 0.7:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            document = rng.choice(DOCUMENTS)(document, rng)
        return json.dumps(document).encode()
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(BYTES)(data, rng)
    return data


def _flip(data: bytes, rng: Random) -> bytes:
    if not data:
        return b"\x80"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _replace_byte(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _without_range(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 8, 100)) :]


def _doubled_range(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[: start + rng.choice((1, 8, 60))] + data[start:]


def _with_token(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _digits(data: bytes, rng: Random) -> bytes:
    """Another digit, or more of them, in place of one."""
    places = [at for at, byte in enumerate(data) if byte in b"0123456789"]
    if not places:
        return _with_token(data, rng)
    at = rng.choice(places)
    digits = rng.choice((b"0", b"1", b"9", b"-1", b"99999", b"9" * 12, b"1e30", b"0x1", b"1.5"))
    return data[:at] + digits + data[at + 1 :]


def _swapped_lines(data: bytes, rng: Random) -> bytes:
    for separator in rng.sample((b"\n", b",", b";"), 3):
        parts = data.split(separator)
        if len(parts) > 2:
            one, other = rng.randrange(len(parts)), rng.randrange(len(parts))
            parts[one], parts[other] = parts[other], parts[one]
            return separator.join(parts)
    return data[::-1]


def _repeated_line(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    return b"\n".join([*lines[:at], *[lines[at]] * rng.choice((2, 50)), *lines[at:]])


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flip, _replace_byte, _truncate, _without_range, _doubled_range, _with_token, _digits,
    _digits, _swapped_lines, _repeated_line,
)  # fmt: skip


def _some_path(document: Any, rng: Random) -> Path:
    """A random way down, so that few large parts do not get all mutations."""
    path: Path = []
    while isinstance(document, dict | list) and document:
        if path and rng.random() < 0.1:
            break
        keys = list(document) if isinstance(document, dict) else range(len(document))
        path.append(rng.choice(keys))
        document = document[path[-1]]
    return path


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


def _set(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    _at(document, path[:-1])[path[-1]] = value
    return document


def _other_value(document: Any, rng: Random) -> Any:
    return _set(document, _some_path(document, rng), rng.choice(VALUES))


def _other_number(document: Any, rng: Random) -> Any:
    for _ in range(50):
        path = _some_path(document, rng)
        value = _at(document, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            near = value + rng.choice((-1, 1, 2))
            return _set(document, path, rng.choice((near, near, -value, *NUMBERS)))
    return _set(document, path, rng.choice(NUMBERS))


def _like_another(document: Any, rng: Random) -> Any:
    """The value of another place, of the same type if one is found quickly."""
    path = _some_path(document, rng)
    for _ in range(30):
        value = _at(document, _some_path(document, rng))
        if type(value) is type(_at(document, path)):
            break
    return _set(document, path, json.loads(json.dumps(value)))


def _deleted(document: Any, rng: Random) -> Any:
    path = _some_path(document, rng)
    path = path[: rng.randrange(1, len(path) + 1)] if path else path
    if path:
        del _at(document, path[:-1])[path[-1]]
    return document


def _renamed(document: Any, rng: Random) -> Any:
    for _ in range(30):
        path = _some_path(document, rng)
        path = path[: rng.randrange(1, len(path) + 1)] if path else path
        if path and isinstance(path[-1], str):
            holder = _at(document, path[:-1])
            others = [key for key in holder if key != path[-1]] or ["x"]
            holder[rng.choice((path[-1] + "s", "", *others))] = holder.pop(path[-1])
            break
    return document


def _resized(document: Any, rng: Random) -> Any:
    """A list with an item twice, many times, elsewhere, or without it."""
    for _ in range(30):
        path = _some_path(document, rng)[:-1]
        value = _at(document, path[: rng.randrange(len(path) + 1)] if path else path)
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            if rng.random() < 0.2:
                value.reverse()
            elif rng.random() < 0.3:
                value.append(value.pop(at))
            else:
                value[at : at + 1] = [value[at]] * rng.choice((0, 2, 3, 300))
            break
    return document


def _nested(document: Any, rng: Random) -> Any:
    path = _some_path(document, rng)
    value = _at(document, path)
    for _ in range(rng.choice((1, 2, 30, 90))):
        value = [value] if rng.random() < 0.7 else {"x": value}
    return _set(document, path, value)


def _other_text(document: Any, rng: Random) -> Any:
    for _ in range(50):
        path = _some_path(document, rng)
        value = _at(document, path)
        if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            words = ("", "x", "0", "-", "'", '"', "\n", "@", "[", "=", ":", "é", "9" * 20)
            return _set(document, path, value[:at] + rng.choice(words) + value[at + 1 :])
    return document


DOCUMENTS: tuple[Callable[[Any, Random], Any], ...] = (
    _other_value, _other_number, _other_number, _like_another, _like_another, _deleted, _renamed,
    _resized, _nested, _other_text,
)  # fmt: skip
