"""Columns: numbers and strings of a report in; one block of bytes, and where each column lies, out.

A block is the length of its head as 4 bytes, the head as JSON, and all columns, each from a multiple of
8 bytes on. `web/src/data/block.ts` reads it.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

ALIGNED = 8
_LEVEL = 9
_FITTING = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))
Ref = tuple[str, int, int]  # the kind of number, the first byte among all columns, and how many
Ragged = tuple[Ref, Ref]  # how many numbers each row has, and all numbers


class Columns:
    """All columns of a block, and its strings, each once."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self._numbers: dict[str, int] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def string(self, text: str) -> int:
        """Its number among the strings."""
        number = self._numbers.setdefault(text, len(self.strings))
        if number == len(self.strings):
            self.strings.append(text)
        return number

    def texts(self, found: Iterable[str]) -> Ref:
        return self.counts([self.string(text) for text in found])

    def counts(self, found: Sequence[int]) -> Ref:
        """Numbers from 0 on, in the smallest kind that holds them."""
        most = max(found, default=0)
        kind = next((kind for kind, end in _FITTING if most < end), "d")
        return self.column(kind, found)

    def column(self, kind: str, found: Iterable[Any]) -> Ref:
        """`kind` is that of Python's array: b, B, h, H, i, I, or d."""
        values = array(kind, found)
        if sys.byteorder == "big":
            values.byteswap()
        at = self._size
        data = values.tobytes()
        data += bytes(-len(data) % ALIGNED)
        self._parts.append(data)
        self._size += len(data)
        return kind, at, len(values)

    def ragged(self, rows: Iterable[Sequence[int]]) -> Ragged:
        lengths: list[int] = []
        flat: list[int] = []
        for row in rows:
            lengths.append(len(row))
            flat += row
        return self.counts(lengths), self.counts(flat)

    def block(self, head: Any) -> bytes:
        encoded = msgspec.json.encode(head)
        encoded += b" " * (-(len(encoded) + 4) % ALIGNED)
        return b"".join((len(encoded).to_bytes(4, "little"), encoded, *self._parts))


def packed(block: bytes) -> str:
    """As text for a page: deflated, in base 64."""
    return base64.b64encode(zlib.compress(block, _LEVEL)).decode()
