"""limit: no rank needs more memory than it has."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import World
from piper.check.peak import Peak, peak_of
from piper.check.problem import Problem, problem
from piper.ir.form.byte_sizes import show_size


def limit(world: World, memory_limit: int | None) -> Iterator[Problem]:
    """Parties whose peak is above the limit, with the largest slots that are alive then."""
    for party in world.distinct if memory_limit is not None else ():
        peak = peak_of(world, party)
        assert memory_limit is not None
        if peak.total <= memory_limit:
            continue
        local = world.local(party)
        facts = [f"{name} {show_size(size)}" for name, size in peak.by_category.items() if size]
        for size, slot in peak.largest:
            made = local.writer_before(slot, peak.task + 1)
            by = "" if made < 0 else f", made by {party.tasks[made].name}"
            origin = party.tasks[made].origin if made >= 0 else -1
            if 0 <= origin < len(world.plan.history):
                by += f", from {world.plan.history[origin].call}"
            facts.append(f"{show_size(size)} {party.slots[slot].name}{by}")
        text = (
            f"{party.label} needs {show_size(peak.total)}, the limit is {show_size(memory_limit)}"
        )
        at = [(party, peak.task)] if peak.task >= 0 else []
        yield problem(world, "limit", text, *at, facts=facts)


def peaks(world: World) -> tuple[Peak, ...]:
    return tuple(peak_of(world, party) for party in world.distinct)
