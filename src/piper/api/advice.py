"""Advice: the directive that would help a rank that ran out of memory, from what its memory is for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from piper.errors import OutOfMemory
from piper.insight.memory_remedies import ADVICE, taken_in
from piper.plan.types import Plan

_MORE_RANKS = "a larger mesh, with less on each rank"


def advice(held: Mapping[str, int], taken: Collection[str] = ()) -> str | None:
    """What would make the largest use smaller, but for uses where that advice is `taken` already."""
    sizes = {use: size for use, size in held.items() if size and use in ADVICE}
    left = {use: size for use, size in sizes.items() if use not in taken}
    if not left:
        return _MORE_RANKS if sizes else None
    return ADVICE[max(left, key=lambda use: left[use])]


def with_advice(error: OutOfMemory, plan: Plan) -> OutOfMemory:
    legal = advice(error.held, taken_in(plan))
    found = OutOfMemory(error.message, details=error.details, held=error.held, legal=legal)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found
