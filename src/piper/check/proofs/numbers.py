"""numbers: constants, layouts of buckets and places of gradients are what training needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.holdings import is_cut
from piper.plan.slots import BUCKETED, LINGERING, SUMS, Slot
from piper.plan.tasks import Add, Comm, Run, Stepping, Task
from piper.plan.types import Bucket


def numbers(world: World) -> Iterator[Problem]:
    """Divisors, constants, parts of buckets and microbatches that are not what their plan says."""
    for bucket in world.plan.buckets:
        yield from _layout(world, bucket)
    for party in world.distinct:
        yield from _slots(world, party)
        yield from _microbatches(world, party)
        yield from _starts(world, party)
        for index in range(len(party.tasks)):
            yield from _task(world, party, index)


def _layout(world: World, bucket: Bucket) -> Iterator[Problem]:
    """Parameters lie side by side, inside of the bucket, which divides into shards."""
    sizes = [math.prod(shape) for shape in bucket.shapes]
    ends = sorted((o, o + size) for o, size in zip(bucket.offsets, sizes, strict=True))
    apart = all(end <= start for (_, end), (start, _) in pairwise(ends))
    if not apart or (ends and (ends[0][0] < 0 or ends[-1][1] > bucket.size)):
        yield Problem("updates", f"parameters of bucket {bucket.name} overlap or lie outside of it")
    if bucket.size % max(1, world.plan.mesh.size_of(bucket.over)):
        yield Problem("updates", f"bucket {bucket.name} does not divide into its shards")


def _slots(world: World, party: Party) -> Iterator[Problem]:
    for slot in party.slots:
        if slot.bucket >= 0 and slot.kind in BUCKETED:
            bucket = world.plan.buckets[slot.bucket]
            parts = world.plan.mesh.size_of(bucket.over) if is_cut(world.plan, slot) else 1
            dtype = bucket.sums if slot.kind in ("grad", "unreduced") else bucket.dtype
            if (slot.shape, slot.dtype) != ((bucket.size // max(1, parts),), dtype):
                text = f"{party.label}: {slot.name} is not as bucket {bucket.name} has it"
                yield Problem("updates", text)
        elif slot.bucket >= 0:
            bucket = world.plan.buckets[slot.bucket]
            if slot.dtype not in (bucket.wire, bucket.sums) or (
                slot.kind == "temp" and slot.dtype != bucket.wire
            ):
                text = (
                    f"{party.label}: {slot.name} is {slot.dtype}; gradients of bucket {bucket.name}"
                )
                text += f" are summed in {bucket.sums} and reduced in {bucket.wire}"
                yield Problem("updates", text)


def _microbatches(world: World, party: Party) -> Iterator[Problem]:
    """Each leaf of the batch, and each set of keys, is there once per microbatch."""
    given = [s for s in party.slots if s.kind in ("batch", "key")]
    for slot in given:
        if not 0 <= slot.microbatch < world.plan.num_microbatches:
            text = f"{slot.name} is of microbatch {slot.microbatch}, which does not exist"
            yield Problem("updates", f"{party.label}: {text}")
    for (kind, source, number), times in Counter(
        (s.kind, s.source, s.microbatch) for s in given
    ).items():
        if times > 1:
            text = f"{kind} {source} of microbatch {number} is there {times} times"
            yield Problem("updates", f"{party.label}: {text}")


def _starts(world: World, party: Party) -> Iterator[Problem]:
    """A bucket's sum is made, with zeros between its parts, by the first that adds to it. One in which
    gradients are reduced is made once: they would be lost."""
    begun: set[int] = set()
    for index, task in enumerate(party.tasks):
        slot = task.sums[0] if isinstance(task, Add) else -1
        if slot >= 0 and party.slots[slot].kind in SUMS and party.slots[slot].bucket >= 0:
            assert isinstance(task, Add)
            name, lingers = party.slots[slot].name, party.slots[slot].kind in LINGERING
            if slot not in begun and not task.zeros and (lingers or not whole(task)):
                text = f"{task.name} adds to {name}, which has no zeros yet"
                yield problem(world, "updates", text, (party, index))
            elif slot in begun and lingers and task.zeros:
                text = f"{task.name} makes {name} again, and loses what was reduced in it"
                yield problem(world, "updates", text, (party, index))
            begun.add(slot)


def _task(world: World, party: Party, index: int) -> Iterator[Problem]:
    plan, task = world.plan, party.tasks[index]
    wrong = ""
    if isinstance(task, Stepping) and task.count is not None:
        pieces = float(plan.num_data_ranks * plan.num_microbatches)
        if task.count != pieces:
            wrong = f"divides by {task.count:g}, not by {pieces:g} microbatches"
    for slot in (party.slots[s] for s in task.reads):
        wanted = _constant_for(task)
        if slot.kind == "constant" and wanted is not None and float(slot.source) != wanted:
            wrong = f"reads {slot.name} as {slot.source}, not {wanted:g}"
    if isinstance(task, Add) and task.offsets:
        wrong = wrong or _misplaced(world, party, task)
    if isinstance(task, Comm) and task.facts.sums:
        slot = party.slots[task.source]
        wire = plan.buckets[slot.bucket].wire if slot.bucket >= 0 else slot.dtype
        if slot.dtype != wire:
            wrong = f"reduces {slot.name} in {slot.dtype}, not in {wire}"
    if wrong:
        yield problem(world, "updates", f"{task.name} {wrong}", (party, index))


def whole(task: Add) -> bool:
    """Whether an Add starts all of a bucket's sum with one term."""
    return task.first == (True,) and not task.offsets


def _constant_for(task: Task) -> float | None:
    """The gradient of the loss is 1, and whoever has nothing adds 0 to a total."""
    if isinstance(task, Run):
        return 1.0
    return 0.0 if isinstance(task, Comm) and task.facts.sums else None


def _misplaced(world: World, party: Party, task: Add) -> str:
    """A gradient that is added where another parameter lies."""
    bucket = world.plan.buckets[party.slots[task.sums[0]].bucket]
    home = {
        offset: (name, math.prod(shape))
        for offset, name, shape in zip(bucket.offsets, bucket.params, bucket.shapes, strict=True)
    }
    for slot, offset in zip(task.terms, task.offsets, strict=True):
        found: Slot = party.slots[slot]
        name, size = home.get(offset, ("nothing", 0))
        if math.prod(found.shape) != size or found.source != name:
            return f"adds {found.name} where {name} lies"
    return ""
