"""peak: one party's slots and tasks in; the most bytes that are alive at once, by category, out."""

from __future__ import annotations

from dataclasses import dataclass

from piper.check.parties import Party, World, compressed
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.types import Plan


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank when most are alive: by category, at which task, and the largest slots; and
    what stays from step to step, by category. `inside` is what the task's body makes for itself."""

    label: str
    num_ranks: int
    total: int
    by_category: dict[str, int]
    task: int
    largest: tuple[tuple[int, int], ...]  # (bytes, slot)
    kept: dict[str, int]


def most_bytes(plan: Plan) -> int:
    """Of its ranks, what the one that needs most needs at its peak."""
    world = compressed(plan)
    return max(peak_of(world, party).total for party in world.distinct)


def peak_of(world: World, party: Party) -> Peak:
    """In dispatch order, at the load that `shard` plans for."""
    local = world.local(party)
    ledger = MemoryLedger(world.plan, local)
    most, at, kept = ledger.total, -1, dict(ledger.held)
    kept["gradients"] += ledger.left
    for index in range(len(party.tasks)):
        ledger.start(index)
        if ledger.total > most:
            most, at = ledger.total, index
        ledger.end(index)
    ledger = MemoryLedger(world.plan, local)  # again, up to the peak, to see what is alive there
    for index in range(at + 1):
        ledger.start(index)
        if index < at:
            ledger.end(index)
    return Peak(
        label=party.label,
        num_ranks=party.num_ranks,
        total=most,
        by_category=ledger.held,
        task=at,
        largest=tuple(ledger.largest()[:5]),
        kept=kept,
    )
