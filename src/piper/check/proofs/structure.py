"""structure: every number in the plan names something; the other proofs rely on it."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem
from piper.plan.types import Plan, Slot, Task

COMMUNICATION = ("send", "recv", "all_reduce", "all_to_all", "reduce_scatter", "all_gather")


def structure(world: World) -> Iterator[Problem]:
    """Tasks, slots, streams, groups, buckets and tensors that do not exist, or are the wrong way."""
    yield from _groups_and_buckets(world.plan)
    for party in world.distinct:
        for index, slot in enumerate(party.slots):
            why = _wrong_slot(world.plan, party, index, slot)
            if why:
                yield Problem("structure", f"{party.label}: slot {slot.name} {why}")
        for index, task in enumerate(party.tasks):
            why = _wrong_task(world.plan, party, index, task)
            if why:
                yield _named(world, party, index, why)


def _named(world: World, party: Party, index: int, why: str) -> Problem:
    task = party.tasks[index]
    line = f"{party.label}: task {index} {task.kind} {task.name}"
    return Problem("structure", f"{task.name} {why}", (task.name,), (line,))


def _groups_and_buckets(plan: Plan) -> Iterator[Problem]:
    slices = {part.slice for part in plan.classes}
    for group in plan.groups:
        if not (set(group.over) <= set(plan.mesh.names) and set(group.slices) <= slices):
            yield Problem("structure", f"group {group} has axes or slices that do not exist")
    for bucket in plan.buckets:
        axes = {*bucket.over, *bucket.copies, *bucket.split_over}
        alike = len(bucket.params) == len(bucket.shapes) == len(bucket.offsets)
        if not (axes <= set(plan.mesh.names) and set(bucket.slices) <= slices and alike):
            text = f"bucket {bucket.name} has axes, slices or parameters that do not exist"
            yield Problem("structure", text)


def _wrong_slot(plan: Plan, party: Party, index: int, slot: Slot) -> str:
    if slot.base >= len(party.slots) or slot.base == index:
        return "shows a slot that does not exist"
    if slot.bound is not None and not slot.shape:
        return "has a bound but no dim"
    seen = {index}
    while slot.base >= 0:
        if slot.base >= len(party.slots):
            return "shows a slot that does not exist"
        if slot.base in seen:
            return "shows itself"
        seen.add(slot.base)
        slot = party.slots[slot.base]
    bucketed = slot.kind in ("flat", "shard", "gathered", "grad")
    if slot.bucket >= len(plan.buckets) or (bucketed and slot.bucket < 0):
        return "belongs to a bucket that does not exist"
    return ""


def _wrong_task(plan: Plan, party: Party, index: int, task: Task) -> str:
    if not 0 <= task.stream < len(plan.streams):
        return "runs on a stream that does not exist"
    if any(not 0 <= s < len(party.slots) for s in (*task.reads, *task.writes, *task.frees)):
        return "names a slot that does not exist"
    if any(not 0 <= w < len(party.tasks) for w in task.waits):
        return "waits for a task that does not exist"
    if (task.kind in (*COMMUNICATION, "read")) != (task.group >= 0):
        return "has no group" if task.group < 0 else "has a group but does not communicate"
    if task.group >= len(plan.groups):
        return "names a group that does not exist"
    if task.kind in ("update", "settle") and not 0 <= task.bucket < len(plan.buckets):
        return "names a bucket that does not exist"
    return _wrong_numbers(party, task)


def _wrong_numbers(party: Party, task: Task) -> str:
    """Tasks with more or fewer slots than their kind takes."""
    num_reads, num_writes = len(task.reads), len(task.writes)
    tensors = [s for s in task.reads if party.slots[s].kind != "host"]
    match task.kind:
        case "send":
            right = (num_reads, num_writes) == (1, 0)
        case "recv":
            right = (num_reads, num_writes) == (0, 1)
        case "read":
            right = (num_reads, num_writes) == (2, 1)
        case "add":
            bucketed = num_writes == 1 and party.slots[task.writes[0]].bucket >= 0
            right = len(task.first) == num_reads and (bucketed or num_writes == num_reads)
            right &= len(task.offsets) in (0, num_reads)
        case "norm":
            right = len(task.weights) == num_reads == num_writes == 1
        case "update":
            right = num_reads >= 1 and num_writes >= 1
        case "run" | "settle":
            right = True
        case _:
            whole = [s for s in task.writes if party.slots[s].base < 0]
            right = len(tensors) == 1 and len(whole) == 1
    return "" if right else f"has {num_reads} reads and {num_writes} writes"
