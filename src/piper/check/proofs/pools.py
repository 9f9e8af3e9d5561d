"""pools: slots that share a buffer fit into it and take turns, surely one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.report.summary import slot_bytes
from piper.plan.slots import POOLED
from piper.plan.tasks import Comm, Task


def pools(world: World) -> Iterator[Problem]:
    """Buffers with slots that do not fit, or written before whoever freed them is surely complete.

    That a slot's users come between its write and its free is what `memory` and `events` prove; and a
    step begins when the last one is complete.
    """
    for party in world.distinct:
        if any(slot.pool >= 0 for slot in party.slots):
            yield from _misfits(world, party)
            yield from _turns(world, party)


def _misfits(world: World, party: Party) -> Iterator[Problem]:
    """Uses that no buffer is made for."""
    root = world.local(party).root
    use = world.local(party).use
    pool = [party.slots[r].pool for r in root]
    first: dict[int, tuple[int, int]] = {}  # buffer -> its first slot, and the task that uses that
    for index, task in enumerate(party.tasks):
        for slot in (*task.writes, *task.reads):
            if pool[slot] < 0:
                continue
            like, user = first.setdefault(pool[slot], (root[slot], index))
            why = _misused(task, slot) or _unfit(party, root[slot], like, use)
            if why:
                name = party.slots[slot].name
                text = f"{task.name} uses {name} in buffer {pool[slot]}, which {why}"
                yield problem(world, "pools", text, (party, index), (party, user))


def _misused(task: Task, slot: int) -> str:
    if isinstance(task, Comm):
        return "a communication may not keep" if slot in task.reads else ""
    return "only communication may write" if slot in task.writes else ""


def _unfit(party: Party, slot: int, like: int, use: Sequence[str]) -> str:
    """Why a slot has no place in a buffer that was made for another one."""
    mine, other = party.slots[slot], party.slots[like]
    if mine.kind not in POOLED or mine.bound is not None:
        return "is for passing tensors of fixed size"
    if slot in party.results.values():
        return "is used again before the result is read"
    if slot_bytes(mine) != slot_bytes(other) or use[slot] != use[like]:
        return f"has {slot_bytes(other)} bytes of {use[like]} for {other.name}"
    return ""


def _turns(world: World, party: Party) -> Iterator[Problem]:
    """Writes into a buffer that another slot may still have."""
    local = world.local(party)
    holder: dict[int, int] = {}  # buffer -> the slot that was written last
    freed: dict[int, int] = {}  # slot -> the task that freed it
    wrote: dict[int, int] = {}
    for index, task in enumerate(party.tasks):
        for slot in task.writes:
            slot = local.root[slot]
            pool = party.slots[slot].pool
            if pool < 0:
                continue
            other = holder.get(pool, slot)
            if other != slot:
                by = freed.get(other, wrote[other])
                if other not in freed or not local.ordered(by, index):
                    when = f"until {party.tasks[by].name} is over" if other in freed else "still"
                    name = party.slots[other].name
                    text = f"{task.name} writes buffer {pool}, which {name} has {when}"
                    yield problem(world, "pools", text, (party, index), (party, by))
            holder[pool] = slot
            wrote[slot] = index
            freed.pop(slot, None)
        for slot in task.frees:
            if party.slots[slot].pool >= 0:
                freed[slot] = index
