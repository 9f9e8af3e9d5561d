"""Protobuf's wire format: fields in, bytes out. Only what a trace needs."""

from __future__ import annotations

from functools import cache

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_SMALL = [bytes([value]) for value in range(0x80)]


def varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return _SMALL[value]
    value &= (1 << 64) - 1  # negative numbers as 64 bits
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


@cache
def _tag(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)


def integer(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return _tag(field, _FIXED64) + value.to_bytes(8, "little")


def message(field: int, *parts: bytes) -> bytes:
    """A field that holds a message of these fields, or a string of bytes."""
    content = b"".join(parts)
    return _tag(field, _BYTES) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    return message(field, value.encode())
