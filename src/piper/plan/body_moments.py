"""Moments: how a body's memory passes while it runs, in the few steps that decide its peak."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """A part of a body's run: the most bytes of its `own` tensors, neither arguments nor results.

    As it begins the body `makes` the results at these places; after it the body reads the arguments at
    the places in `drops` no more. A result that no moment makes is there from the start, and an argument
    that none drops stays to the end.
    """

    own: int
    makes: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


Moments = tuple[Moment, ...]


def larger(one: Moments, other: Moments) -> Moments:
    """The moments of one code whose tensors have other sizes elsewhere: the larger ones count. If memory
    passes in another way there, all counts at once."""
    if [(m.makes, m.drops) for m in one] != [(m.makes, m.drops) for m in other]:
        return (Moment(max(moment.own for moment in (*one, *other))),)
    pairs = zip(one, other, strict=True)
    return tuple(Moment(max(a.own, b.own), a.makes, a.drops) for a, b in pairs)


def shortened(moments: Moments) -> Moments:
    """Without moments that can be no peak, whichever arguments are freed; empty if all is one moment
    without tensors of its own."""
    kept: list[Moment] = []
    for moment in moments:
        while kept and (both := _joined(kept[-1], moment)) is not None:
            moment = both
            kept.pop()
        kept.append(moment)
    if kept:  # what is made first is there from the start, what is dropped last stays to the end
        kept[0] = msgspec.structs.replace(kept[0], makes=())
        kept[-1] = msgspec.structs.replace(kept[-1], drops=())
    return tuple(kept) if len(kept) > 1 or any(moment.own for moment in kept) else ()


def _joined(one: Moment, other: Moment) -> Moment | None:
    """Two moments as one, if only one of them can be a peak."""
    makes, drops = one.makes + other.makes, one.drops + other.drops
    if not one.drops and one.own <= other.own:
        return Moment(other.own, makes, drops)
    if not other.makes and other.own <= one.own:
        return Moment(one.own, makes, drops)
    return None


def peak_moment(moments: Moments, freed: Sequence[int], filled: Sequence[int]) -> int:
    """Which moment has most bytes alive. `freed` has the bytes of each argument that the body may drop,
    `filled` those of each result that is new; other arguments and results have 0."""
    alive = sum(freed) + sum(filled)
    alive -= sum(filled[place] for moment in moments for place in moment.makes)
    most, peak = -1, 0
    for number, moment in enumerate(moments):
        alive += sum(filled[place] for place in moment.makes)
        if alive + moment.own > most:
            most, peak = alive + moment.own, number
        alive -= sum(freed[place] for place in moment.drops)
    return peak
