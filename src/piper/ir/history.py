"""What was done to a graph: one Record per directive, with the user's line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from piper.errors import Call


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One directive: who asked, with which arguments (as code), and how many nodes came and went."""

    call: Call
    arguments: str
    added: int = 0
    removed: int = 0

    def __str__(self) -> str:
        target = "mesh = " if self.call.name == "mesh" else ""
        return f"{target}s.{self.call.name}({self.arguments})"


class History(tuple[Record, ...]):
    """The records of all directives; prints as a strategy that can be pasted."""

    __slots__ = ()

    def __str__(self) -> str:
        return history_as_code(self)

    __repr__ = __str__


def history_as_code(history: Sequence[Record]) -> str:
    """The directives as a strategy that can be pasted."""
    lines = "".join(f"    {record}\n" for record in history) or "    pass\n"
    return f"import piper\nfrom piper import where\n\n\ndef strategy(s):\n{lines}"
