"""What choices about memory cost: plans in; bytes that ranks send, and seconds on a machine, out."""

from __future__ import annotations

from collections.abc import Iterator

from piper.cost.machine import Machine
from piper.plan.memory_use import memory_use
from piper.plan.tasks import Comm, gathers, scatters
from piper.plan.types import Plan, RankClass

_PASSES = 3  # over the bytes of what is made again: two are read and one is written, or fewer


def moved(plan: Plan) -> float:
    """Bytes that all ranks send for gathers and reductions of buckets in a step."""
    total = 0.0
    for found in plan.classes:
        ranks = plan.mesh.size_of(plan.mesh.free(found.slice))
        for task in _moves(found):
            size = plan.groups[task.group].size(plan.mesh)
            total += ranks * task.facts.carries(_brought(found, task), size)
    return total


def exchange_seconds(plan: Plan, machine: Machine) -> float:
    """Of the same, one after the other, on the rank where that takes longest."""
    longest = 0.0
    for found in plan.classes:
        first = next(iter(plan.mesh.ranks(found.slice)))
        total = 0.0
        for task in _moves(found):
            ranks = plan.groups[task.group].ranks(plan.mesh, first)
            taken = machine.exchange_of(task.facts, ranks, brought=_brought(found, task))
            total += taken.latency + taken.seconds
        longest = max(longest, total)
    return longest


def remaking_seconds(plain: Plan, again: Plan, machine: Machine) -> float:
    """What backwards take to make again the bytes that one plan saves and the other does not, on the
    rank where they are most."""
    pairs = zip(plain.classes, again.classes, strict=True)
    dropped = max(_saved(one) - _saved(other) for one, other in pairs)
    return _PASSES * max(0, dropped) / machine.bandwidth


def _moves(found: RankClass) -> Iterator[Comm]:
    for task in found.tasks:
        if gathers(task) or scatters(task):
            yield task


def _brought(found: RankClass, task: Comm) -> int:
    return found.slots[task.source].type.nbytes


def _saved(found: RankClass) -> int:
    """Bytes that all forwards of a step leave for backwards."""
    uses = zip(found.slots, memory_use(found.slots, found.tasks), strict=True)
    return sum(slot.type.nbytes for slot, use in uses if use == "saved")
