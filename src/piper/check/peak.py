"""peak: one party's slots and tasks in; the most bytes that are alive at once, by category, out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from piper.check.parties import Party, World
from piper.ir.values import Value, accumulation_dtype, dtype_bytes
from piper.plan.types import PERSISTENT, Optimizer, Slot

CATEGORIES = ("parameters", "gradients", "optimizer", "saved", "gathered", "buffers")


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank when most are alive: by category, at which task, and the largest slots."""

    label: str
    num_ranks: int
    total: int
    by_category: dict[str, int]
    task: int
    largest: tuple[tuple[int, int], ...]  # (bytes, slot)


def peak_of(world: World, party: Party) -> Peak:
    """In dispatch order, at the bounds of what depends on the data."""
    local = world.local(party)
    size = [
        slot_bytes(slot) if local.root[index] == index else 0
        for index, slot in enumerate(party.slots)
    ]
    there = [slot.kind in (*PERSISTENT, "batch") for slot in party.slots]
    alive: Counter[str] = Counter()
    for index, slot in enumerate(party.slots):
        if there[index]:
            alive[slot.memory] += size[index]
    late = {}  # bucket -> bytes that a late update keeps
    for task in party.tasks:
        if task.kind == "update":
            written = [party.slots[s] for s in task.writes]
            alive["optimizer"] += sum(state_bytes(slot, world.plan.optimizer) for slot in written)
            if task.late:
                late[task.bucket] = sum(_kept_bytes(slot, world.plan.optimizer) for slot in written)
    total = sum(alive.values())
    best, at, snapshot, live = total, -1, Counter(alive), list(there)
    for index, task in enumerate(party.tasks):
        grown = total
        for slot in task.writes:
            root = local.root[slot]
            if not there[root]:
                there[root] = True
                total += size[root]
                alive[party.slots[root].memory] += size[root]
        if task.kind == "update" and task.late:
            total += late[task.bucket]
            alive["optimizer"] += late[task.bucket]
        if total > best and total > grown:
            best, at = total, index
        for slot in task.frees:
            if there[slot] and size[slot]:
                there[slot] = False
                total -= size[slot]
                alive[party.slots[slot].memory] -= size[slot]
        if task.kind == "settle":
            total -= late.get(task.bucket, 0)
            alive["optimizer"] -= late.get(task.bucket, 0)
    if at >= 0:
        snapshot, live = _at(world, party, at, size, late)
    largest = sorted(((size[i], i) for i, t in enumerate(live) if t and size[i]), reverse=True)
    by_category = {name: snapshot[name] for name in CATEGORIES}
    return Peak(party.label, party.num_ranks, best, by_category, at, tuple(largest[:5]))


def _at(
    world: World, party: Party, at: int, size: list[int], late: dict[int, int]
) -> tuple[Counter[str], list[bool]]:
    """What is alive while a task runs."""
    root = world.local(party).root
    live = [slot.kind in (*PERSISTENT, "batch") for slot in party.slots]
    kept = 0
    for index, task in enumerate(party.tasks[: at + 1]):
        for slot in task.writes:
            live[root[slot]] = True
        if task.kind == "update" and task.late:
            kept += late[task.bucket]
        if index < at:
            for slot in task.frees:
                live[slot] = False
            if task.kind == "settle":
                kept -= late.get(task.bucket, 0)
    alive: Counter[str] = Counter(optimizer=kept)
    for index, slot in enumerate(party.slots):
        if live[index]:
            alive[slot.memory] += size[index]
    for task in party.tasks:
        if task.kind == "update":
            for written in task.writes:
                alive["optimizer"] += state_bytes(party.slots[written], world.plan.optimizer)
    return alive, live


def slot_bytes(slot: Slot) -> int:
    if slot.kind == "host":
        return 0
    return Value(slot.name, "activation", slot.shape, slot.dtype, bound=slot.bound).bound_nbytes


def state_bytes(slot: Slot, optimizer: Optimizer) -> int:
    """What the optimizer keeps for a parameter: its averages, and a master of a narrow one."""
    wide = accumulation_dtype(slot.dtype)
    copies = _copies(optimizer) + (wide != slot.dtype)
    return math.prod(slot.shape) * dtype_bytes(wide) * copies


def _kept_bytes(slot: Slot, optimizer: Optimizer) -> int:
    """What a late update keeps until it is settled: parameters and averages as they were."""
    wide = accumulation_dtype(slot.dtype)
    return math.prod(slot.shape) * dtype_bytes(wide) * (1 + _copies(optimizer))


def _copies(optimizer: Optimizer) -> int:
    if optimizer.name in ("Adam", "AdamW"):
        return 3 if optimizer.options.get("amsgrad") else 2
    return 1 if optimizer.options.get("momentum") else 0
