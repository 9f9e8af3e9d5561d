"""Advice: the directive that would help a rank that ran out of memory, from what its memory is for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from piper.directives.replicate import Replicate
from piper.errors import OutOfMemory
from piper.plan.types import Plan

_ADVICE = {
    "saved": 'recompute(where(...), keep="nothing") drops what forwards save for their backwards',
    "parameters": "replicate(..., zero=3) keeps a part of the parameters on each rank",
    "gradients": "replicate(..., zero=2) keeps a part of the gradients on each rank",
    "optimizer": "replicate(..., zero=1) keeps a part of the optimizer state on each rank",
    "gathered": "replicate(..., prefetch=0) or a smaller bucket_size gathers less at once",
    "buffers": 'split(where(), "MB", ...) into more and thus smaller microbatches',
}
_MORE_RANKS = "a larger mesh, with less on each rank"
_ZERO = {"optimizer": 1, "gradients": 2, "parameters": 3}


def advice(held: Mapping[str, int], taken: Collection[str] = ()) -> str | None:
    """What would make the largest use smaller, but for uses where that advice is `taken` already."""
    sizes = {use: size for use, size in held.items() if size and use in _ADVICE}
    left = {use: size for use, size in sizes.items() if use not in taken}
    if not left:
        return _MORE_RANKS if sizes else None
    return _ADVICE[max(left, key=lambda use: left[use])]


def taken_in(plan: Plan) -> set[str]:
    """Uses of memory that the strategy has cut already."""
    directives = [record.directive for record in plan.history]
    level = min((d.zero for d in directives if isinstance(d, Replicate)), default=0)
    found = {use for use, needed in _ZERO.items() if level >= needed}
    if any(record.directive.kind == "recompute" for record in plan.history):
        found.add("saved")
    return found


def with_advice(error: OutOfMemory, plan: Plan) -> OutOfMemory:
    legal = advice(error.held, taken_in(plan))
    found = OutOfMemory(error.message, details=error.details, held=error.held, legal=legal)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found
