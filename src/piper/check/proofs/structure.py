"""structure: every number in a task names something; the other proofs rely on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from piper.check.parties import Party, World
from piper.check.problem import Problem
from piper.ir.communication import COMMUNICATION
from piper.plan.slots import BUCKETED, PARTS, SLOT_KINDS, Slot, SlotKind
from piper.plan.tasks import NO_SLOT, TASKS, Add, Comm, Meeting, Settle, Task, Update, scatters
from piper.plan.types import Plan


def structure(world: World) -> Iterator[Problem]:
    """Tasks, slots, streams and groups that do not exist, or are the wrong way; see also `frame`."""
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


def _wrong_slot(plan: Plan, party: Party, index: int, slot: Slot) -> str:
    if slot.base >= len(party.slots) or slot.base == index:
        return "shows a slot that does not exist"
    if slot.bound is not None and not slot.shape:
        return "has a bound but no dim"
    seen = {index} if slot.base >= 0 else set()
    while slot.base >= 0:
        if slot.base >= len(party.slots):
            return "shows a slot that does not exist"
        if slot.base in seen:
            return "shows itself"
        seen.add(slot.base)
        slot = party.slots[slot.base]
    named = party.slots[index]
    if named.base >= 0 and not _shows(named, party.slots[named.base]):
        return f"shows what {party.slots[named.base].name} does not have"
    if slot.kind in SLOT_KINDS and named.kind in SLOT_KINDS:
        look, nothing = _SILENT[named.kind]
        if look(named) != nothing:
            has = ", ".join(SLOT_KINDS[named.kind].has) or "nothing more"
            return f"says more of itself than a {named.kind}, which has {has}"
        if named.kind == "temp" and named.source and named.bucket >= 0:
            return "is of one parameter and of a whole bucket"
        if named.kind == "temp" and named.source and named.source not in plan.tensors:
            return f"is a gradient of {named.source!r}, which the model does not have"
        if named.bucket >= 0 and named.bound is not None:
            return "is of a bucket, but of no fixed size"
        if named.base >= 0 and named.pool >= 0:
            return "is a part of another slot, but has a buffer of its own"
    else:
        return f"is of kind {slot.kind!r}, which does not exist"
    if slot.bucket >= len(plan.buckets) or (slot.kind in BUCKETED and slot.bucket < 0):
        return "belongs to a bucket that does not exist"
    return ""


def _silent(kind: SlotKind) -> tuple[Callable[[Slot], tuple[Any, ...]], tuple[Any, ...]]:
    """What a slot of a kind must leave out: how to look, and how that looks. Who may have a `pool`, the
    proof `pools` says."""
    fields = {f.name: f.default for f in msgspec.structs.fields(Slot) if not f.required}
    fields["bound"] = None  # which its type has
    silent = [name for name in fields if name not in (*kind.has, "pool")]
    return attrgetter(*silent), tuple(fields[name] for name in silent)


_SILENT = {kind.name: _silent(kind) for kind in SLOT_KINDS.values()}


def _shows(part: Slot, whole: Slot) -> bool:
    """A parameter lies in a bucket, and so does a shard, which is the rank's part of it."""
    if part.bound is not None or whole.bound is not None or part.dtype != whole.dtype:
        return False
    end = part.offset + math.prod(part.shape)
    if part.kind in PARTS:
        lies_in = "flat" if part.kind == "shard" else "unreduced"
        return (whole.kind, whole.bucket, part.offset) == (lies_in, part.bucket, 0)
    inside = part.offset >= 0 and end <= math.prod(whole.shape)
    return part.kind == "param" and whole.kind in ("flat", "gathered") and inside


def _wrong_task(plan: Plan, party: Party, index: int, task: Task) -> str:
    if TASKS.get(type(task).__struct_config__.tag) is not type(task):  # type: ignore[arg-type]
        return f"is of kind {task.kind!r}, which no plan has"
    if not 0 <= task.stream < len(plan.streams):
        return "runs on a stream that does not exist"
    slots = (*task.reads, *task.writes, *task.frees)
    if slots and not 0 <= min(slots) <= max(slots) < len(party.slots):
        return "names a slot that does not exist"
    if task.waits and not 0 <= min(task.waits) <= max(task.waits) < len(party.tasks):
        return "waits for a task that does not exist"
    if not -1 <= task.origin < max(len(plan.history), 1):
        return "comes from a directive that does not exist"
    if isinstance(task, Meeting) and not 0 <= task.group < len(plan.groups):
        return "names a group that does not exist"
    rule = RULES.get(type(task))
    return rule(plan, party, task) if rule is not None else ""


def _wrong_add(plan: Plan, party: Party, task: Add) -> str:
    num_terms, num_sums = len(task.terms), len(task.sums)
    bucketed = num_sums == 1 and party.slots[task.sums[0]].bucket >= 0
    right = len(task.first) == num_terms and (bucketed or num_sums == num_terms)
    if bucketed and not task.offsets:  # parts of the bucket that lie as it does
        whole = party.slots[task.sums[0]].shape
        right &= all(party.slots[term].shape == whole for term in task.terms)
    if right and len(task.offsets) in (0, num_terms):
        return ""
    return f"has {num_terms} terms and {num_sums} sums"


def _wrong_step(plan: Plan, party: Party, task: Update | Settle) -> str:
    if not 0 <= task.bucket < len(plan.buckets):
        return "names a bucket that does not exist"
    if not task.stepped:
        return "steps nothing"
    if (task.count is None) == (task.counted == NO_SLOT):
        return "has not one divisor, a number or a slot"
    clips = isinstance(task, Settle) or task.clip is not None
    return "" if clips == (task.norm != NO_SLOT) else "clips without a norm, or has one for nothing"


def _fillable(party: Party, task: Comm) -> bool:
    """Whether a communication leaves something in memory of its own, or reduces it in its place."""
    target = party.slots[task.target]
    in_place = task.source == (target.base if scatters(task) else task.target)
    return target.base < 0 or (target.kind == "grad" and in_place)


def _wrong_comm(plan: Plan, party: Party, task: Comm) -> str:
    kind = COMMUNICATION.get(task.comm)
    if kind is None:
        return f"is a communication {task.comm!r}, which does not exist"
    if (task.source != NO_SLOT) != kind.brings or (task.target != NO_SLOT) != kind.leaves:
        return f"does not bring and leave what a {task.comm} does"
    by_number = task.splits != NO_SLOT or (task.reverse and not kind.directed)
    if by_number and not kind.by_rows:
        return f"sends rows by number, which a {task.comm} cannot"
    if task.reverse and task.splits == NO_SLOT and not kind.directed:
        return "sends rows back without their numbers"
    if task.splits != NO_SLOT and party.slots[task.splits].kind != "host":
        return f"takes {party.slots[task.splits].name} for numbers on the host"
    if task.source != NO_SLOT and party.slots[task.source].kind == "host":
        return f"sends {party.slots[task.source].name}, which is no tensor"
    if task.target != NO_SLOT and not _fillable(party, task):
        return "fills a part of another slot"
    if task.splits != NO_SLOT:
        there, back = (party.slots[s].bound is None for s in (task.source, task.target))
        if (task.reverse, not task.reverse) != (back, there):
            return "sends rows back that have not come, or on that have"
    return ""


# What is particular to a kind; that its slots, streams and groups exist is asked of all.
RULES: dict[type[Task], Callable[..., str]] = {
    Add: _wrong_add,
    Update: _wrong_step,
    Settle: _wrong_step,
    Comm: _wrong_comm,
}
