"""collectives: all members of a communicator see the same ones, in one order, of fitting shapes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from piper.check.parties import Members, Party, World
from piper.check.problem import Problem, problem
from piper.check.proofs.messages import same_tensor, show
from piper.plan.types import Slot, Task

KINDS = ("all_reduce", "all_to_all", "reduce_scatter", "all_gather")
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
            if task.kind in KINDS and party.number in party.groups[task.group]:
                found[world.communicator(party, task)][party.number].append(index)
    return found


def _groups(world: World, party: Party) -> Iterator[Problem]:
    """Each task by itself: it is in its group, and its own shapes fit the group's size."""
    for index, task in enumerate(party.tasks):
        if task.kind not in (*KINDS, "read"):
            continue
        group = world.plan.groups[task.group]
        fixed = {axis for at in group.slices for axis in at.axes}
        if party.slice not in group.slices:
            text = f"{task.name} is not in its own group {group}"
        elif fixed & set(group.over) or len(set(group.slices)) < len(group.slices):
            text = f"{task.name}: group {group} has ranks twice"
        elif task.kind == "read":
            continue
        else:
            text = _misfit(task, party.slots, world.size(task))
        if text:
            yield problem(world, "collectives", text, (party, index))


def _misfit(task: Task, slots: tuple[Slot, ...], size: int) -> str:
    """Why a collective's output cannot come from its input; '' if it can."""
    inputs = [slots[s] for s in task.reads if slots[s].kind != "host"]
    outputs = [slots[s] for s in task.writes if slots[s].base < 0]
    one, other = inputs[0], outputs[0]
    have, make = math.prod(one.shape), math.prod(other.shape)
    routed = any(slots[s].kind == "host" for s in task.reads)
    match task.kind:
        case "all_reduce":
            fits = same_tensor(one, other)
        case "all_gather":
            fits = make == have * size and one.dtype == other.dtype
        case "reduce_scatter":
            fits = have == make * size and one.dtype == other.dtype
        case _ if routed:
            fits = one.shape[1:] == other.shape[1:] and one.dtype == other.dtype
        case _:
            fits = bool(one.shape) and one.shape[0] % size == 0 and have == make
            fits = fits and (one.shape == other.shape or other.shape[0] == size)
    if fits:
        return ""
    return f"{task.name} cannot make {show(other)} of {show(one)} over {size} ranks"


def _counts(world: World, party: Party) -> Iterator[Problem]:
    """Rows travel by counts that the same group has exchanged and the host has read."""
    local = world.local(party)
    writer: dict[int, int] = {}
    for index, task in enumerate(party.tasks):
        if task.kind == "all_to_all":
            for slot in (s for s in task.reads if party.slots[s].kind == "host"):
                by = writer.get(slot, -1)
                made = party.tasks[by] if by >= 0 else None
                if made is None or made.kind != "read" or world.group(made) != world.group(task):
                    yield _uncounted(world, party, index, by, f"rows by {party.slots[slot].name}")
        elif task.kind == "read":
            sent, received = task.reads
            by = writer.get(received, -1)
            made = party.tasks[by] if by >= 0 else None
            right = made is not None and made.kind == "all_to_all" and sent in made.reads
            if made is None or not right or world.group(made) != world.group(task):
                yield _uncounted(world, party, index, by, party.slots[received].name)
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
            if (one.kind, one.key, one.reverse) != (other.kind, other.key, other.reverse):
                text = f"{first.label} joins {one.name} where {party.label} joins {other.name}"
                yield problem(world, "collectives", text, (first, a), (party, b))
                break
            given = [first.slots[one.reads[0]], party.slots[other.reads[0]]]
            if one.kind != "all_to_all" and not same_tensor(*given):
                text = f"{one.name} brings {show(given[0])}, {other.name} {show(given[1])}"
                yield problem(world, "collectives", text, (first, a), (party, b))
        else:
            for at, who, peer in (
                *((i, first, party) for i in mine[len(theirs) :]),
                *((i, party, first) for i in theirs[len(mine) :]),
            ):
                text = f"{who.tasks[at].name}: {peer.label} never joins"
                yield problem(world, "collectives", text, (who, at))
