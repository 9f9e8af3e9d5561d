"""norms: what updates divide by and clip with is summed over everything, and known before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.mesh import Group
from piper.plan.tasks import (
    NO_SLOT,
    Add,
    Meeting,
    Norm,
    Settle,
    Stepping,
    Update,
    gathers,
    reduces,
)


def norms(world: World) -> Iterator[Problem]:
    """Counts, norms and results that are not totals; norms that miss a gradient or count one twice;
    updates that are clipped differently, or never settled."""
    for party in world.distinct:
        yield from _totals(world, party)
        yield from _settled(world, party)
    yield from _clips(world)
    yield from _weights(world)


def _totals(world: World, party: Party) -> Iterator[Problem]:
    for name, slot in party.results.items():
        if name.startswith("prediction."):
            continue  # of its own rows
        group = world.all_ranks if name == "squares" else world.everything
        yield from _total(world, party, len(party.tasks), slot, f"the result {name}", group)
    for index, task in enumerate(party.tasks):
        if isinstance(task, Stepping):
            if task.counted != NO_SLOT:
                what = f"the divisor of {task.name}"
                yield from _total(world, party, index, task.counted, what, world.everything)
            if task.norm != NO_SLOT:
                what = f"the norm of {task.name}"
                yield from _total(world, party, index, task.norm, what, world.all_ranks)
                yield from _norm(world, party, index, task)


def _total(
    world: World, party: Party, index: int, slot: int, what: str, group: Group
) -> Iterator[Problem]:
    """A number is the same everywhere only if its writer has summed it over all that have a term."""
    by = world.local(party).writer_before(slot, index)
    if by < 0 or group.size(world.plan.mesh) == 1:
        return
    task = party.tasks[by]
    if not reduces(task) or world.group(task) != group:
        where = f", but over {world.group(task)}" if isinstance(task, Meeting) else ""
        text = f"{what} is not summed over all ranks{where}"
        yield problem(world, "updates", text, (party, by), facts=(f"all ranks are {group}",))


def _norm(world: World, party: Party, index: int, task: Update | Settle) -> Iterator[Problem]:
    """The norm is of all gradients of the party, as they are when updates use them."""
    local = world.local(party)
    total, end = task.norm, index
    by = local.writer_before(total, end)
    summed = party.tasks[by] if by >= 0 else task
    if reduces(summed):
        total, end = summed.source, by
    squares: dict[int, list[int]] = {}  # bucket -> the tasks that square its gradient
    for at in local.writers.get(total, []):
        add = party.tasks[at]
        for slot in add.terms if isinstance(add, Add) and at < end else ():
            by = local.writer_before(slot, at)
            squared = party.tasks[by] if by >= 0 else add
            if isinstance(squared, Norm):
                squares.setdefault(party.slots[squared.gradient].bucket, []).append(by)
    for number, bucket in world.trained_at(party.slice):
        found = squares.get(number, [])
        if len(found) != 1:
            how = f"has the gradient of bucket {bucket.name} {len(found)} times"
            text = f"the norm of {task.name} {how}"
            yield problem(world, "updates", text, *((party, i) for i in (index, *found)))
            continue
        (by,) = found
        (slot,) = party.tasks[by].reads
        writers = local.writers.get(local.root[slot], [])
        steps = {w: isinstance(party.tasks[w], Stepping) for w in writers}
        late = [w for w, stepping in steps.items() if w > by and not stepping]
        early = [w for w, stepping in steps.items() if w < by and stepping]
        if late:
            text = f"{party.tasks[by].name} reads {party.slots[slot].name} before it is whole"
            yield problem(world, "updates", text, (party, by), (party, late[0]))
        if early:
            text = f"{party.tasks[by].name} reads {party.slots[slot].name} after it was divided"
            yield problem(world, "updates", text, (party, by), (party, early[0]))


def _settled(world: World, party: Party) -> Iterator[Problem]:
    """A late update is settled; and what an update has written is for the next step: in its own nobody
    reads that, but who settles it, and who gathers it to where all of it lies."""
    local = world.local(party)
    settles: dict[int, list[int]] = {}
    for index, task in enumerate(party.tasks):
        if isinstance(task, Settle):
            settles.setdefault(task.bucket, []).append(index)
    for index, task in enumerate(party.tasks):
        if not isinstance(task, Update):
            continue
        found = [i for i in settles.get(task.bucket, []) if i > index]
        if len(found) != int(task.late) or len(settles.get(task.bucket, [])) != len(found):
            why = "is not settled once" if task.late else "is settled but not late"
            yield problem(world, "updates", f"{task.name} {why}", (party, index))
            continue
        final = found[0] if found else index
        for slot in task.writes:
            for reader in local.readers.get(local.root[slot], []):
                if index < reader < final:
                    text = f"{party.tasks[reader].name} reads what {task.name} wrote, unsettled"
                    yield problem(world, "updates", text, (party, reader), (party, final))
                elif reader > final and not _spreads(party, reader, task):
                    text = f"{party.tasks[reader].name} reads what {task.name} wrote in this step"
                    yield problem(world, "updates", text, (party, reader), (party, index))
                else:
                    continue
                break


def _spreads(party: Party, index: int, update: Update) -> bool:
    """Whether a task gathers the shards that an update has stepped into the parameters beside them."""
    task = party.tasks[index]
    return gathers(task) and task.source in update.stepped and party.slots[task.source].base >= 0


def _clips(world: World) -> Iterator[Problem]:
    """All updates are clipped as the plan says."""
    found: dict[float | None, tuple[Party, int]] = {}
    for party in world.parties:
        for index, task in enumerate(party.tasks):
            if isinstance(task, Settle) or (isinstance(task, Update) and not task.late):
                found.setdefault(task.clip, (party, index))
    wrong = {clip: at for clip, at in found.items() if clip != world.plan.clip}
    if wrong:
        text = f"updates are clipped at {', '.join(map(str, found))}, not at {world.plan.clip}"
        yield problem(world, "updates", text, *wrong.values())


def _weights(world: World) -> Iterator[Problem]:
    """Each gradient counts once in the norm, however many ranks hold it."""
    mesh = world.plan.mesh
    weight: dict[int, float] = {}
    for party in world.distinct:
        for task in party.tasks:
            if isinstance(task, Norm):
                gradient = party.slots[task.gradient]
                if gradient.kind != "grad":
                    yield Problem("updates", f"{task.name} is of {gradient.name} too")
                    continue
                bucket = world.plan.buckets[gradient.bucket]
                copies = mesh.size_of((*bucket.copies, *bucket.same))
                weight[gradient.bucket] = weight.get(gradient.bucket, 0.0) + task.weight * copies
    for number, total in weight.items():
        if not math.isclose(total, 1.0, rel_tol=1e-9):
            name = world.plan.buckets[number].name
            yield Problem("updates", f"the gradient of bucket {name} counts {total:g} times")
