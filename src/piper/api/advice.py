"""Advice: the directive that would help a rank that ran out of memory, from what its memory is for."""

from __future__ import annotations

from collections.abc import Mapping

from piper.errors import OutOfMemory

_ADVICE = {
    "saved": 'recompute(where(...), keep="nothing") drops what forwards save for their backwards',
    "parameters": "replicate(..., zero=3) keeps a part of the parameters on each rank",
    "gradients": "replicate(..., zero=2) keeps a part of the gradients on each rank",
    "optimizer": "replicate(..., zero=1) keeps a part of the optimizer state on each rank",
    "gathered": "replicate(..., prefetch=0) or a smaller bucket_size gathers less at once",
    "buffers": 'split(where(), "MB", ...) into more and thus smaller microbatches',
}


def advice(held: Mapping[str, int]) -> str | None:
    """What would make the largest use smaller."""
    known = {use: size for use, size in held.items() if size and use in _ADVICE}
    return _ADVICE[max(known, key=lambda use: known[use])] if known else None


def with_advice(error: OutOfMemory) -> OutOfMemory:
    found = OutOfMemory(
        error.message, details=error.details, held=error.held, legal=advice(error.held)
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found
