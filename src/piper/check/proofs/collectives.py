"""collectives: all members of a communicator see the same ones, in one order, of fitting shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeGuard

from piper.check.parties import Members, Party, World
from piper.check.problem import Problem, problem
from piper.check.proofs.messages import show
from piper.ir.communication import same_tensor
from piper.plan.slots import Slot
from piper.plan.tasks import NO_SLOT, Comm, Meeting, Read, Task

Communicator = tuple[Members, tuple[str, ...], int]


def collectives(world: World) -> Iterator[Problem]:
    """Members that meet at different collectives, and shapes or counts that do not fit."""
    for party in world.distinct:
        yield from _groups(world, party)
        yield from _counts(world, party)
    by_number = {party.number: party for party in world.parties}
    for communicator, joined in sorted(communicators(world).items()):
        members = [by_number[n] for n in communicator[0] if n in by_number]
        yield from _compare(world, members, joined)


def communicators(world: World) -> dict[Communicator, dict[int, list[int]]]:
    """Communicator -> member -> its collectives in dispatch order."""
    found: dict[Communicator, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for party in world.parties:
        for index, task in enumerate(party.tasks):
            if _collective(task) and party.number in party.groups[task.group]:
                found[world.communicator(party, task)][party.number].append(index)
    return found


def _collective(task: Task) -> TypeGuard[Comm]:
    return isinstance(task, Comm) and not task.facts.is_message


def _groups(world: World, party: Party) -> Iterator[Problem]:
    """Each task by itself: it is in its group, and its own shapes fit the group's size."""
    for index, task in enumerate(party.tasks):
        if not isinstance(task, Meeting) or (isinstance(task, Comm) and task.facts.is_message):
            continue
        group = world.plan.groups[task.group]
        fixed = {axis for at in group.slices for axis in at.axes}
        if party.slice not in group.slices:
            text = f"{task.name} is not in its own group {group}"
        elif fixed & set(group.over) or len(set(group.slices)) < len(group.slices):
            text = f"{task.name}: group {group} has ranks twice"
        elif not isinstance(task, Comm):
            continue
        elif bool(task.key) != (len(group.slices) > 1):
            text = f"{task.name} has a key among ranks of one class, or none among several"
        else:
            text = _misfit(task, party.slots, world.size(task))
        if text:
            yield problem(world, "collectives", text, (party, index))


def _misfit(task: Comm, slots: tuple[Slot, ...], size: int) -> str:
    """Why a collective's output cannot come from its input; '' if it can."""
    source, target = slots[task.source], slots[task.target]
    if task.facts.fits(source, target, size, task.splits != NO_SLOT):
        return ""
    return f"{task.name} cannot make {show(target)} of {show(source)} over {size} ranks"


def _counts(world: World, party: Party) -> Iterator[Problem]:
    """Rows travel by counts that the same group has exchanged and the host has read."""
    local = world.local(party)
    writer: dict[int, int] = {}
    for index, task in enumerate(party.tasks):
        if isinstance(task, Comm) and task.splits != NO_SLOT:
            by = writer.get(task.splits, -1)
            made = party.tasks[by] if by >= 0 else None
            if not isinstance(made, Read) or world.group(made) != world.group(task):
                what = f"rows by {party.slots[task.splits].name}"
                yield _uncounted(world, party, index, by, what)
        elif isinstance(task, Read):
            splits = party.slots[task.splits]
            if (splits.kind, splits.shape) != ("host", (2, world.size(task))):
                text = f"{task.name} reads two numbers a rank into {show(splits)}"
                yield problem(world, "collectives", text, (party, index))
            by = writer.get(task.received, -1)
            made = party.tasks[by] if by >= 0 else None
            exchanged = isinstance(made, Comm) and made.facts.by_rows and made.source == task.sent
            if not exchanged or world.group(made) != world.group(task):  # type: ignore[arg-type]
                yield _uncounted(world, party, index, by, party.slots[task.received].name)
        for slot in task.writes:
            writer[local.root[slot]] = index


def _uncounted(world: World, party: Party, index: int, by: int, what: str) -> Problem:
    text = f"{party.tasks[index].name}: {what}, which its group has not exchanged"
    tasks = [(party, index)] + ([(party, by)] if by >= 0 else [])
    return problem(world, "collectives", text, *tasks)


def _compare(world: World, members: list[Party], joined: dict[int, list[int]]) -> Iterator[Problem]:
    """All members against the first that has any."""
    first = next(party for party in members if joined.get(party.number))
    mine = joined[first.number]
    for party in members:
        theirs = joined.get(party.number, [])
        if party is first or (party.tasks is first.tasks and mine == theirs):
            continue
        for a, b in zip(mine, theirs, strict=False):
            one, other = first.tasks[a], party.tasks[b]
            assert isinstance(one, Comm) and isinstance(other, Comm)
            if (one.comm, one.meeting, one.reverse) != (other.comm, other.meeting, other.reverse):
                text = f"{first.label} joins {one.name} where {party.label} joins {other.name}"
                yield problem(world, "collectives", text, (first, a), (party, b))
                break
            if one.tags != other.tags:
                text = f"{one.name} has other tags than {other.name}"
                yield problem(world, "labels", text, (first, a), (party, b))
            source, other_source = first.slots[one.source], party.slots[other.source]
            if one.facts.alike and not same_tensor(source, other_source):
                text = f"{one.name} brings {show(source)}, {other.name} {show(other_source)}"
                yield problem(world, "collectives", text, (first, a), (party, b))
        else:
            for at, who, peer in (
                *((i, first, party) for i in mine[len(theirs) :]),
                *((i, party, first) for i in theirs[len(mine) :]),
            ):
                text = f"{who.tasks[at].name}: {peer.label} never joins"
                yield problem(world, "collectives", text, (who, at))
