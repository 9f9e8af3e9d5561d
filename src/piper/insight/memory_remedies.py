"""Memory remedies: a strategy in; the directives that would lower a rank's peak of memory, and by how
much, out. Where the program is at hand each of them is applied and lowered; else a plan says what each
could take at most."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from piper.check.parties import compressed
from piper.check.peak import peak_of
from piper.directives.order import Order
from piper.directives.recompute import Keep, Recompute
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.errors import Call, PiperError
from piper.ir.history import Record
from piper.ir.select import where
from piper.observe.timeline import MICROBATCH
from piper.plan.types import Plan
from piper.schedules import SCHEDULES, schedule
from piper.schedules.replay import peak_held
from piper.schedules.table import Table

ADVICE = {
    "saved": 'recompute(where(...), keep="nothing") drops what forwards save for their backwards',
    "parameters": "replicate(..., zero=3) keeps a part of the parameters on each rank",
    "gradients": "replicate(..., zero=2) keeps a part of the gradients on each rank",
    "optimizer": "replicate(..., zero=1) keeps a part of the optimizer state on each rank",
    "gathered": "replicate(..., prefetch=0) or a smaller bucket_size gathers less at once",
    "buffers": 'split(where(), "MB", ...) into more and thus smaller microbatches',
}
_ZERO = {"optimizer": 1, "gradients": 2, "parameters": 3}
Lower = Callable[[Sequence[Record]], Plan]


class Remedy(msgspec.Struct, frozen=True):
    """Other directives, and the bytes by which the plan's peak is then smaller; or why they are refused.
    One that was not `tried` takes at most so many."""

    directives: tuple[str, ...]
    saves: int
    peak: int
    tried: bool = True
    refused: str = ""


def plan_peak(plan: Plan, rank: int | None = None) -> int:
    """The most bytes of a rank, or of all of them, as tasks are dispatched."""
    world = compressed(plan)
    at = {} if rank is None else plan.mesh.coordinates(rank)
    return max(
        peak_of(world, party).total
        for party in world.parties
        if all(at.get(axis, index) == index for axis, index in party.slice.fixed)
    )


def tried_remedies(plan: Plan, lower: Lower, *, rank: int | None = None) -> list[Remedy]:
    """Each alone, with the peak of the plan that it gives; those that save most first."""
    before = plan_peak(plan, rank)
    found = []
    for changed, records in candidates(plan):
        try:
            peak = plan_peak(lower(records), rank)
        except PiperError as error:
            found.append(Remedy(changed, 0, before, refused=error.message))
        else:
            found.append(Remedy(changed, before - peak, peak))
    return sorted(found, key=lambda remedy: (bool(remedy.refused), -remedy.saves))


def possible_remedies(plan: Plan, held: Mapping[str, int]) -> list[Remedy]:
    """By what a peak is made of: the most that each directive could take of it."""
    total, taken = sum(held.values()), taken_in(plan)
    found = []
    for category, words in ADVICE.items():
        nbytes = held.get(category, 0)
        if category in _ZERO:  # one part of so many is left
            sizes = (plan.mesh.size_of((*b.over, *b.copies)) for b in plan.buckets)
            copies = max(sizes, default=1)
            nbytes -= nbytes // copies
        if nbytes > 0 and category not in taken:
            found.append(Remedy((words,), nbytes, total - nbytes, tried=False))
    return sorted(found, key=lambda remedy: -remedy.saves)


def taken_in(plan: Plan) -> Collection[str]:
    """Uses of memory that the strategy has cut already."""
    directives = [record.directive for record in plan.history]
    level = min((d.zero for d in directives if isinstance(d, Replicate)), default=0)
    found = {use for use, needed in _ZERO.items() if level >= needed}
    if any(isinstance(d, Recompute) and d.keep != "everything" for d in directives):
        found.add("saved")
    return found


def candidates(plan: Plan) -> Iterator[tuple[tuple[str, ...], list[Record]]]:
    """The directives that are new, and the whole strategy with them."""
    history = list(plan.history)
    for change in (_higher_zero, _less_ahead, _less_in_flight, _more_microbatches):
        records = change(plan, history)
        changed = [str(new) for new, old in zip(records, history, strict=True) if new != old]
        if changed:
            yield tuple(changed), records
    yield from _recomputing(history)


def _replaced(record: Record, **changes: object) -> Record:
    directive: Any = record.directive
    directive = msgspec.structs.replace(directive, **changes)
    return msgspec.structs.replace(record, directive=directive)


def _higher_zero(plan: Plan, history: list[Record]) -> list[Record]:
    """ZeRO one level up, wherever there are copies."""
    return [
        _replaced(record, zero=record.directive.zero + 1)
        if isinstance(record.directive, Replicate)
        and record.directive.zero < 3
        and plan.mesh.size_of(_axes(record.directive)) > 1
        else record
        for record in history
    ]


def _less_ahead(plan: Plan, history: list[Record]) -> list[Record]:
    """Gathers one chunk less ahead."""
    return [
        _replaced(record, prefetch=record.directive.prefetch - 1)
        if isinstance(record.directive, Replicate)
        and record.directive.zero == 3
        and record.directive.prefetch
        else record
        for record in history
    ]


def _less_in_flight(plan: Plan, history: list[Record]) -> list[Record]:
    """The schedule of the same placement with the fewest microbatches in flight."""
    return [
        _replaced(record, groups=_leanest(record.directive.groups))
        if isinstance(record.directive, Order) and isinstance(record.directive.groups, Table)
        else record
        for record in history
    ]


def _leanest(table: Table) -> Table:
    best, least = table, max(peak_held(table))
    for name in SCHEDULES:
        if name == "auto":  # it searches, and by time
            continue
        other = _remade(name, table, table.num_microbatches)
        if other is None or other.placement() != table.placement():
            continue
        held = max(peak_held(other))
        if held < least:
            best, least = other, held
    return best


def _remade(name: str, table: Table, microbatches: int) -> Table | None:
    per_rank = table.num_stages // table.num_ranks
    for stages_per_rank in (None, per_rank):
        try:
            found = schedule(
                name,
                num_ranks=table.num_ranks,
                num_microbatches=microbatches,
                stages_per_rank=stages_per_rank,
            )
        except PiperError:
            continue
        if found.num_stages == table.num_stages:
            return found
    return None


def _more_microbatches(plan: Plan, history: list[Record]) -> list[Record]:
    """Twice as many, under the same schedule."""
    found = []
    for record in history:
        directive = record.directive
        if isinstance(directive, Split) and directive.tag == MICROBATCH:
            found.append(_replaced(record, num=2 * directive.num))
        elif isinstance(directive, Order):
            table = directive.groups
            if not isinstance(table, Table) or table.name not in SCHEDULES:
                return history
            other = _remade(table.name, table, 2 * table.num_microbatches)
            if other is None:
                return history
            found.append(_replaced(record, groups=other))
        else:
            found.append(record)
    return found


def _recomputing(history: list[Record]) -> Iterator[tuple[tuple[str, ...], list[Record]]]:
    """Everywhere, with less kept than now."""
    kept = {r.directive.keep for r in history if isinstance(r.directive, Recompute)}
    if "nothing" in kept:
        return
    rest = [record for record in history if not isinstance(record.directive, Recompute)]
    less: tuple[Keep, ...] = ("nothing",) if "expensive" in kept else ("expensive", "nothing")
    for keep in less:
        new = Record(Call("recompute"), Recompute(where(), keep=keep))
        at = next((i for i, r in enumerate(rest) if isinstance(r.directive, Split)), len(rest))
        yield (str(new),), [*rest[:at], new, *rest[at:]]


def _axes(directive: Replicate) -> tuple[str, ...]:
    return (directive.over,) if isinstance(directive.over, str) else directive.over
