"""What choices about memory cost: plans in; bytes that ranks send, and seconds on a machine, out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from piper.cost.machine import Machine
from piper.plan.memory_use import memory_use
from piper.plan.tasks import Comm, Run, gathers, scatters
from piper.plan.types import Plan, RankClass

_EXPOSED = 0.25  # of the shorter of moving and computing, that the other does not hide
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


def choice_seconds(plan: Plan, plain: Plan, machine: Machine) -> float:
    """What gathers and reductions take beside products and what backwards make again that they do not
    find saved as in a `plain` plan, of which most is hidden by the other; on the rank where that is
    longest."""
    longest = 0.0
    for mine, other in zip(plan.classes, plain.classes, strict=True):
        moving = _exchanging(plan, mine, machine)
        computing = _computing(_work(plan, mine), _work(plain, other), plan, machine)
        taken = max(moving, computing) + _EXPOSED * min(moving, computing)
        longest = max(longest, taken)
    return longest


def made_again(plan: Plan, plain: Plan, machine: Machine) -> float:
    """Seconds in which backwards make what they do not find saved as in a `plain` plan, beside its
    products; on the rank where that is longest."""
    pairs = zip(plan.classes, plain.classes, strict=True)
    return max(_remaking(_work(plan, one), _work(plain, other), machine) for one, other in pairs)


def _exchanging(plan: Plan, found: RankClass, machine: Machine) -> float:
    first = next(iter(plan.mesh.ranks(found.slice)))
    total = 0.0
    for task in _moves(found):
        ranks = plan.groups[task.group].ranks(plan.mesh, first)
        taken = machine.exchange_of(task.facts, ranks, brought=_brought(found, task))
        total += taken.latency + taken.seconds
    return total


class _Work(NamedTuple):
    """Of one rank in a step: operations of its bodies, and bytes that forwards leave for backwards."""

    flops: float
    saved: int


def _work(plan: Plan, found: RankClass) -> _Work:
    flops = sum(plan.body_flops.get(t.body, 0.0) for t in found.tasks if isinstance(t, Run))
    uses = zip(found.slots, memory_use(found.slots, found.tasks), strict=True)
    return _Work(flops, sum(slot.type.nbytes for slot, use in uses if use == "saved"))


def _computing(mine: _Work, plain: _Work, plan: Plan, machine: Machine) -> float:
    dtype = plan.precision.compute or plan.buckets[0].dtype
    products = machine.roofline(mine.flops, 0.0, dtype)
    return products + _remaking(mine, plain, machine)


def _remaking(mine: _Work, plain: _Work, machine: Machine) -> float:
    return _PASSES * max(0, plain.saved - mine.saved) / machine.bandwidth


def _moves(found: RankClass) -> Iterator[Comm]:
    for task in found.tasks:
        if gathers(task) or scatters(task):
            yield task


def _brought(found: RankClass, task: Comm) -> int:
    return found.slots[task.source].type.nbytes
