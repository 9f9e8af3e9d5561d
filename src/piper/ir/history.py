"""What was done to a graph: one Record per directive, with the user's line."""

from __future__ import annotations

import msgspec

from piper.errors import Call


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One directive: who asked, with which arguments (as code), and how many nodes came and went."""

    call: Call
    arguments: str
    added: int = 0
    removed: int = 0

    def __str__(self) -> str:
        return f"s.{self.call.name}({self.arguments})"
