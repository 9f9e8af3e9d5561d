"""Cadence: what directives leave open about communication and memory, as said or as chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from piper.ir.directive import AnyDirective
from piper.ir.nodes import ONCE

Again = Literal["", "expensive", "nothing"]


class Cadence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the directive `origin`, what its user left open, and the reason for the choice: whole sums are
    reduced after every `reduce_every` microbatches, and what is gathered stays for `reuse` uses; either
    is ONCE a step, or None where the user has said it. Of the buckets `kept` it stays all step. Memory
    for that may come from its chunks, of whose results only so much is kept for backwards, which compute
    the rest `again`; as `recompute` has it. What is said of a `split` is said of all chunks: at most
    so many microbatches are `under_way` at once, any number with 0."""

    origin: int
    reduce_every: int | None
    reuse: int | None
    reason: str
    kept: tuple[int, ...] = ()
    again: Again = ""
    under_way: int = 0

    def __str__(self) -> str:
        words = []
        if self.reduce_every is not None:
            words.append(f"gradients are reduced {every(self.reduce_every)}")
        if self.reuse is not None:
            held = "a step" if self.reuse == ONCE else f"{self.reuse} uses"
            often = "for each use" if self.reuse == 1 else f"once for {held}"
            words.append(f"parameters are gathered {often}")
        if self.kept:
            words.append(f"those of {len(self.kept)} buckets once a step")
        if self.under_way:
            words.append(under_way(self.under_way))
        if self.again:
            what = "all" if self.again == "nothing" else "what is cheap"
            words.append(f"{what} is computed again in backwards")
        return f"{', '.join(words)}: {self.reason}"


def under_way(most: int) -> str:
    """In words."""
    if most == 1:
        return "microbatches run one after the other"
    return f"at most {most} microbatches are under way"


def every(number: int) -> str:
    """In words."""
    if number == ONCE:
        return "once a step"
    return "after each microbatch" if number == 1 else f"after every {number} microbatches"


def asked_for(
    directive: AnyDirective, chosen: Mapping[int, Cadence], origin: int, bucket: int = -1
) -> tuple[int, int]:
    """`reduce_every` and `reuse` that hold for a bucket of a directive: as that says, else as was
    chosen."""
    found = chosen.get(origin)
    said = (getattr(directive, "reduce_every", None), getattr(directive, "reuse", None))
    reuse = found.reuse if found and bucket not in found.kept else ONCE
    open_to = (found.reduce_every, reuse) if found else (None, None)
    every_, uses = (
        ONCE if isinstance(one, str) else other if one is None else one
        for one, other in zip(said, open_to, strict=True)
    )
    return (ONCE if every_ is None else every_), (1 if uses is None else uses)
