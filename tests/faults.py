"""Faults planted in good plans, one kind a function: where, what must be refused, and by which proof."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from piper.check import World, compressed, expanded
from piper.check.proofs.limit import peaks
from piper.ir.communication import COMMUNICATION
from piper.plan.memory_use import memory_use
from piper.plan.slots import LINGERING, STAYING, SUMS
from piper.plan.tasks import Add, Task
from piper.plan.types import Plan, RankClass
from tests.tasks import with_slots


@dataclass(frozen=True)
class Fault:
    """A plan with one fault; one of `proofs` must fail first and name one of `tasks`."""

    plan: Plan
    proofs: frozenset[str]
    tasks: frozenset[str]
    where: tuple[int, int] = (0, 0)  # class and task
    world: World | None = None  # where one rank differs from others of its class
    memory_limit: int | None = None


Plant = Callable[[Plan], Iterator[Fault]]
COLLECTIVES = tuple(name for name, row in COMMUNICATION.items() if not row.is_message)


def with_tasks(plan: Plan, number: int, tasks: Iterable[Task]) -> Plan:
    part = msgspec.structs.replace(plan.classes[number], tasks=tuple(tasks))
    classes = (*plan.classes[:number], part, *plan.classes[number + 1 :])
    return msgspec.structs.replace(plan, classes=classes)


def changed(plan: Plan, number: int, index: int, **changes: object) -> Plan:
    tasks = list(plan.classes[number].tasks)
    tasks[index] = msgspec.structs.replace(tasks[index], **changes)
    return with_tasks(plan, number, tasks)


def permuted(tasks: tuple[Task, ...], order: list[int]) -> list[Task]:
    """Tasks in another order, each waiting for the same tasks."""
    place = {old: new for new, old in enumerate(order)}
    return [
        msgspec.structs.replace(tasks[old], waits=tuple(sorted(place[w] for w in tasks[old].waits)))
        for old in order
    ]


def without(tasks: tuple[Task, ...], index: int) -> list[Task]:
    """One task less; who waited for it, or came next on its stream, waits for what it waited for."""
    gone = tasks[index]
    left = list(tasks)
    after = [i for i in range(index + 1, len(tasks)) if tasks[i].stream == gone.stream][:1]
    before = [i for i in range(index) if tasks[i].stream == gone.stream][-1:]
    for i, task in enumerate(tasks):
        if i in after or index in task.waits:
            waits = {*task.waits, *gone.waits, *before} - {index}
            left[i] = msgspec.structs.replace(task, waits=tuple(sorted(waits)))
    return [
        msgspec.structs.replace(t, waits=tuple(w - (w > index) for w in t.waits))
        for i, t in enumerate(left)
        if i != index
    ]


def moved(tasks: tuple[Task, ...], index: int, to: int) -> list[int]:
    """The order in which task `index` comes right after what is now task `to`, or before it."""
    order = [i for i in range(len(tasks)) if i != index]
    order.insert(order.index(to) + (1 if to > index else 0), index)
    return order


def each(plan: Plan, *kinds: str) -> Iterator[tuple[int, RankClass, int, Any]]:
    for number, part in enumerate(plan.classes):
        for index, task in enumerate(part.tasks):
            if not kinds or task.kind in kinds:
                yield number, part, index, task


def fault(plan: Plan, proofs: str, *tasks: str, at: tuple[int, int] = (0, 0)) -> Fault:
    return Fault(plan, frozenset(proofs.split()), frozenset(tasks), at)


def dropped_wait(plan: Plan) -> Iterator[Fault]:
    """What is not there any more may be there by another path: see the oracle of the test."""
    for number, _, index, task in each(plan):
        for wait in task.waits:
            left = tuple(w for w in task.waits if w != wait)
            yield fault(changed(plan, number, index, waits=left), "events", at=(number, index))


def swapped_sends(plan: Plan) -> Iterator[Fault]:
    for number, part in enumerate(plan.classes):
        last: dict[tuple[int, int], int] = {}
        for index, task in enumerate(part.tasks):
            if task.kind != "send":
                continue
            other = last.get((task.group, task.stream))
            last[task.group, task.stream] = index
            if other is not None:
                tasks = list(part.tasks)
                a, b = tasks[other], task
                tasks[other] = msgspec.structs.replace(a, source=b.source, key=b.key)
                tasks[index] = msgspec.structs.replace(b, source=a.source, key=a.key)
                yield fault(with_tasks(plan, number, tasks), "messages", a.name, b.name)


def reordered_collective(plan: Plan) -> Iterator[Fault]:
    """On one rank, two collectives of a communicator change places."""
    world = expanded(plan)
    for party in world.parties:
        last: dict[tuple[object, ...], int] = {}
        for index, task in enumerate(party.tasks):
            if task.kind not in COLLECTIVES or len(party.groups[task.group]) == 1:
                continue
            channel = (party.groups[task.group], task.stream)
            other = last.get(channel)
            last[channel] = index
            if other is not None:
                order = list(range(len(party.tasks)))
                order[other], order[index] = index, other
                mine = replace(party, tasks=tuple(permuted(party.tasks, order)))
                parties = tuple(mine if p is party else p for p in world.parties)
                names = frozenset((task.name, party.tasks[other].name))
                yield Fault(
                    plan,
                    frozenset({"collectives"}),
                    names,
                    world=World(plan, parties, by_rank=True),
                )


def dropped_free(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan):
        for slot in task.frees:
            left = tuple(s for s in task.frees if s != slot)
            proof = "gathers" if part.slots[slot].kind == "gathered" else "memory"
            yield fault(changed(plan, number, index, frees=left), proof, task.name)


def doubled_free(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan):
        for slot in task.frees:
            again = min(index + 1, len(part.tasks) - 1)
            other = part.tasks[again]
            yield fault(
                changed(plan, number, again, frees=(*other.frees, slot)), "memory", other.name
            )


def freed_what_stays(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan):
        for slot in task.reads:
            if part.slots[slot].kind in STAYING | LINGERING and part.slots[slot].base < 0:
                changes = changed(plan, number, index, frees=(*task.frees, slot))
                yield fault(changes, "memory", task.name)


def shifted(task: Task, index: int) -> tuple[int, ...]:
    return tuple(w + 1 if w >= index else w for w in task.waits)


def dropped_fold(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "fold"):
        others = {t.name for t in part.tasks if t.kind == "fold"} - {task.name}
        tasks = without(part.tasks, index)
        yield fault(with_tasks(plan, number, tasks), "state memory", *sorted(others)[:1])


def folds_in_another_order(plan: Plan) -> Iterator[Fault]:
    """Two microbatches of a stage change its buffers in each other's place."""
    for number, part, index, task in each(plan, "fold"):
        for later in range(index + 1, len(part.tasks)):
            other = part.tasks[later]
            if other.kind == "fold" and other.writes == task.writes:
                changes = changed(plan, number, index, tags=other.tags)
                yield fault(
                    changed(changes, number, later, tags=task.tags), "state labels", task.name
                )


def folded_from_one_rank(plan: Plan) -> Iterator[Fault]:
    """What a rank has left for its buffers is taken before that of others has come."""
    for number, part, index, task in each(plan, "fold"):
        for taken in task.inputs[len(task.outputs) :]:
            gather = next(t for t in part.tasks if taken in t.writes)
            if gather.kind == "all_gather":
                inputs = tuple(gather.source if i == taken else i for i in task.inputs)
                changes = changed(plan, number, index, inputs=inputs)
                yield fault(changes, "state memory bodies", task.name)


def wrong_group(plan: Plan) -> Iterator[Fault]:
    world = compressed(plan)
    for number, _, index, task in each(plan, *COLLECTIVES, "read"):
        for group in range(len(plan.groups)):
            other = msgspec.structs.replace(task, group=group)
            if world.group(other) != world.group(task):
                changes = changed(plan, number, index, group=group)
                yield fault(changes, "collectives updates gathers state", task.name)


def wrong_peer(plan: Plan) -> Iterator[Fault]:
    world = compressed(plan)
    for number, part, index, task in each(plan, "send", "recv"):
        for group, known in enumerate(plan.groups):
            other = msgspec.structs.replace(task, group=group)
            pair = len(known.slices) == 2 and not world.group(other).over
            if pair and part.slice in known.slices and world.group(other) != world.group(task):
                yield fault(changed(plan, number, index, group=group), "messages", task.name)


def cyclic_wait(plan: Plan) -> Iterator[Fault]:
    """What a task waits for waits for it."""
    for number, part, index, task in each(plan):
        for wait in task.waits:
            before = part.tasks[wait]
            changes = changed(plan, number, wait, waits=(*before.waits, index))
            yield fault(changes, "acyclic", before.name)


def crossed_ranks(plan: Plan) -> Iterator[Fault]:
    """A send waits for the answer to what it sends: no wait is for a later task of its own rank."""
    for number, part, index, task in each(plan, "send"):
        for later in range(index + 1, len(part.tasks)):
            answer = part.tasks[later]
            if answer.kind == "recv":
                order = moved(part.tasks, later, index)
                tasks = permuted(part.tasks, order)
                tasks[index] = msgspec.structs.replace(tasks[index], waits=())
                send = tasks[index + 1]
                waits = tuple(sorted({*send.waits, index}))
                tasks[index + 1] = msgspec.structs.replace(send, waits=waits)
                changes = with_tasks(plan, number, tasks)
                yield fault(changes, "acyclic messages", task.name, answer.name)


def reused_early(plan: Plan) -> Iterator[Fault]:
    """A task writes where another slot is still in use; all users of its own slot go there too."""
    for number, part in enumerate(plan.classes):
        based = {slot.base for slot in part.slots}
        use = memory_use(part.slots, part.tasks)
        live: list[int] = []
        for task in part.tasks:
            for slot in task.writes:
                known = part.slots[slot]
                if known.kind == "temp" and slot not in based:
                    for other in live:
                        like = part.slots[other]
                        same = (like.shape, like.dtype, like.bound, use[other])
                        if same == (known.shape, known.dtype, known.bound, use[slot]):
                            if other not in task.reads:
                                tasks = [with_slots(t, {slot: other}) for t in part.tasks]
                                wrong = with_tasks(plan, number, tasks)
                                yield fault(wrong, "memory collectives", task.name)
                            break
                    live.append(slot)
            live = [slot for slot in live if slot not in task.frees]


def over_the_limit(plan: Plan) -> Iterator[Fault]:
    found = peaks(compressed(plan))
    most = max(peak.total for peak in found)
    for number, peak in enumerate(found):
        if peak.total == most and peak.task >= 0:
            name = plan.classes[number].tasks[peak.task].name
            yield Fault(plan, frozenset({"limit"}), frozenset({name}), memory_limit=most - 1)


def missing_gather(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "all_gather"):
        gathered = part.slots[task.writes[0]].kind == "gathered"
        if part.slots[task.writes[0]].kind == "temp":
            folds = [t.name for t in part.tasks if t.kind == "fold" and task.target in t.reads]
            yield fault(with_tasks(plan, number, without(part.tasks, index)), "memory", *folds)
            continue
        if gathered:
            names = [t.name for t in part.tasks if t.kind == "run" and _meets(part, t, task)]
        else:
            flat = [t for t in part.tasks if t.kind in ("update", "settle")]
            bucket = part.slots[task.writes[0]].bucket
            names = [t.name for t in flat if t.bucket == bucket]
        proof = "gathers" if gathered else "updates"
        yield fault(with_tasks(plan, number, without(part.tasks, index)), proof, *names)


def _meets(part: RankClass, task: Task, gather: Task) -> bool:
    return bool(set(task.reads) & set(_all(part, gather)))


def gather_kept_too_long(plan: Plan) -> Iterator[Fault]:
    for number, part, index, task in each(plan, "run"):
        for slot in task.frees:
            if part.slots[slot].kind == "gathered" and index + 1 < len(part.tasks):
                left = tuple(s for s in task.frees if s != slot)
                tasks = list(part.tasks)
                tasks[index] = msgspec.structs.replace(task, frees=left)
                after = tasks[index + 1]
                tasks[index + 1] = msgspec.structs.replace(after, frees=(*after.frees, slot))
                yield fault(with_tasks(plan, number, tasks), "gathers", task.name)


def gather_shared_too_often(plan: Plan) -> Iterator[Fault]:
    """A gather is dropped; its readers take what the one before it has gathered."""
    for number, part in enumerate(plan.classes):
        last: dict[int, tuple[int, Task]] = {}
        for index, task in enumerate(part.tasks):
            if task.kind != "all_gather" or part.slots[task.writes[0]].kind != "gathered":
                continue
            bucket = part.slots[task.writes[0]].bucket
            if bucket in last:
                before = last[bucket][1]
                old = {(part.slots[s].source, part.slots[s].offset): s for s in _all(part, before)}
                new = {
                    s: old.get((part.slots[s].source, part.slots[s].offset))
                    for s in _all(part, task)
                }
                if None not in new.values():
                    yield _shared(plan, number, index, before, new)  # type: ignore[arg-type]
            last[bucket] = (index, task)


def _all(part: RankClass, gather: Any) -> list[int]:
    """What a gather fills, and the slots that show parts of it."""
    return [s for s, slot in enumerate(part.slots) if gather.target in (s, slot.base)]


def _shared(plan: Plan, number: int, index: int, before: Task, new: dict[int, int]) -> Fault:
    part = plan.classes[number]
    whole = before.writes[0]
    tasks = [
        with_slots(
            msgspec.structs.replace(t, frees=tuple(s for s in t.frees if s != whole)),
            new,
            fields=(*t.READS, "frees"),
        )
        for t in part.tasks
    ]
    return fault(with_tasks(plan, number, without(tuple(tasks), index)), "gathers", before.name)


def late_add(plan: Plan) -> Iterator[Fault]:
    """The last add to a gradient comes after its reduction, which it then waits for."""
    for number, part, index, task in each(plan, "all_reduce", "reduce_scatter"):
        source = part.slots[task.reads[0]]
        adds = [
            i
            for i, t in enumerate(part.tasks[:index])
            if t.kind == "add" and task.reads[0] in t.writes
        ]
        if source.bucket < 0 or len(adds) < 2 or any(part.tasks[adds[-1]].first):
            continue
        last = adds[-1]
        stream = [i for i in range(last) if part.tasks[i].stream == part.tasks[last].stream]
        tasks = permuted(part.tasks, moved(part.tasks, last, index))
        place = next(i for i, t in enumerate(tasks) if t.name == part.tasks[last].name)
        for i, t in enumerate(tasks):  # who waited for it waits for what came before it
            left = {w if w < i else stream[-1] for w in t.waits}
            tasks[i] = msgspec.structs.replace(t, waits=tuple(sorted(left)))
        reduce, add = tasks[place - 1], tasks[place]
        sums = tuple(s for s in reduce.frees if s in task.reads)
        tasks[place - 1] = msgspec.structs.replace(
            reduce, frees=tuple(s for s in reduce.frees if s not in sums)
        )
        waits = tuple(sorted({*add.waits, place - 1}))
        tasks[place] = msgspec.structs.replace(add, waits=waits, frees=(*add.frees, *sums))
        shows = {i for i, slot in enumerate(part.slots) if slot.base == task.reads[0]}
        for i, t in enumerate(tasks[place + 1 :], start=place + 1):  # nobody races with it
            if shows.intersection(t.reads):
                tasks[i] = msgspec.structs.replace(t, waits=tuple(sorted({*t.waits, place})))
        yield fault(with_tasks(plan, number, tasks), "updates", part.tasks[last].name)


def lost_add(plan: Plan) -> Iterator[Fault]:
    """A contribution is freed by whoever made it."""
    for number, part, index, task in each(plan, "add"):
        for slot in task.reads:
            makers = [i for i, t in enumerate(part.tasks[:index]) if slot in t.writes]
            use = memory_use(part.slots, part.tasks)[slot]
            if use != "gradients" or slot not in task.frees or not makers:
                continue
            tasks = list(part.tasks)
            keep = [i for i, s in enumerate(task.reads) if s != slot]
            if not keep or not task.offsets:
                continue
            tasks[index] = msgspec.structs.replace(
                task,
                terms=tuple(task.terms[i] for i in keep),
                first=tuple(task.first[i] for i in keep),
                offsets=tuple(task.offsets[i] for i in keep),
                frees=tuple(s for s in task.frees if s != slot),
            )
            maker = tasks[makers[-1]]
            tasks[makers[-1]] = msgspec.structs.replace(maker, frees=(*maker.frees, slot))
            yield fault(with_tasks(plan, number, tasks), "updates", maker.name)


def another_cadence(plan: Plan) -> Iterator[Fault]:
    """Gradients are reduced more often, or more rarely, than the directive says."""
    for origin, record in enumerate(plan.history):
        said = getattr(record.directive, "reduce_every", None)
        scatters = [t for _, _, _, t in each(plan, "reduce_scatter") if t.origin == origin]
        for other in (1, 2, 3, "step") if said is not None and scatters else ():
            if other == said:
                continue
            directive = msgspec.structs.replace(record.directive, reduce_every=other)
            history = list(plan.history)
            history[origin] = msgspec.structs.replace(record, directive=directive)
            changes = msgspec.structs.replace(plan, history=tuple(history))
            yield fault(changes, "updates", *(task.name for task in scatters))


def added_twice(plan: Plan) -> Iterator[Fault]:
    """A contribution counts twice in its sum."""
    for number, _, index, task in each(plan, "add"):
        if task.offsets and not any(task.first):
            doubled = {
                "terms": (*task.terms, task.terms[0]),
                "first": (*task.first, False),
                "offsets": (*task.offsets, task.offsets[0]),
            }
            yield fault(changed(plan, number, index, **doubled), "updates", task.name)


def sum_started_again(plan: Plan) -> Iterator[Fault]:
    for number, _, index, task in each(plan, "add"):
        if task.first and not any(task.first):
            first = (True,) * len(task.first)
            yield fault(changed(plan, number, index, first=first), "updates", task.name)


def sum_never_started(plan: Plan) -> Iterator[Fault]:
    """The first add of a step goes on from what the last step has left."""
    for number, part, index, task in each(plan, "add"):
        zeroed = any(_zeros(t) and t.writes == task.writes for t in part.tasks)
        if task.first and all(task.first) and not zeroed:
            first = (False,) * len(task.first)
            yield fault(changed(plan, number, index, first=first), "memory updates", task.name)


def _zeros(task: Task) -> bool:
    return isinstance(task, Add) and task.zeros


def early_read(plan: Plan) -> Iterator[Fault]:
    """A chunk reads what is written right after it."""
    for number, part in enumerate(plan.classes):
        for index, task in enumerate(part.tasks):
            later = part.tasks[index + 1].writes if index + 1 < len(part.tasks) else ()
            for slot in later:
                fresh = part.slots[slot].kind in ("temp", *SUMS, "gathered", "host")
                written = any(slot in t.writes for t in part.tasks[: index + 1])
                if task.kind == "run" and fresh and not written:
                    inputs = (*task.inputs, slot)
                    gathered = part.slots[slot].kind == "gathered" or (part.slots[slot].base >= 0)
                    yield fault(
                        changed(plan, number, index, inputs=inputs),
                        "gathers" if gathered else "memory",
                        task.name,
                    )


def wrong_seed(plan: Plan) -> Iterator[Fault]:
    """The gradient of the loss with respect to itself is not 1."""
    for number, part, _, task in each(plan, "run"):
        for slot in task.reads:
            if part.slots[slot].kind == "constant":
                slots = list(part.slots)
                slots[slot] = msgspec.structs.replace(slots[slot], source="3")
                found = msgspec.structs.replace(part, slots=tuple(slots))
                classes = (*plan.classes[:number], found, *plan.classes[number + 1 :])
                changes = msgspec.structs.replace(plan, classes=classes)
                yield fault(changes, "updates", task.name)


FAULTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        dropped_wait, swapped_sends, reordered_collective, dropped_free, doubled_free,
        freed_what_stays, dropped_fold, folds_in_another_order, folded_from_one_rank, wrong_group,
        wrong_peer, cyclic_wait, crossed_ranks, reused_early, over_the_limit, missing_gather,
        gather_kept_too_long, gather_shared_too_often, late_add, lost_add, another_cadence,
        added_twice, sum_started_again, sum_never_started, early_read, wrong_seed,
    )
}  # fmt: skip
