"""Faults of slots that share a buffer: a good plan in, bad ones out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piper.plan.memory_use import memory_use
from piper.plan.types import Plan
from tests.faults import Fault, Plant, fault, with_tasks


def _with_pools(plan: Plan, number: int, pools: dict[int, int]) -> Plan:
    part = plan.classes[number]
    slots = list(part.slots)
    for slot, pool in pools.items():
        slots[slot] = msgspec.structs.replace(slots[slot], pool=pool)
    found = msgspec.structs.replace(part, slots=tuple(slots))
    classes = (*plan.classes[:number], found, *plan.classes[number + 1 :])
    return msgspec.structs.replace(plan, classes=classes)


def shared_while_in_use(plan: Plan) -> Iterator[Fault]:
    """A communication writes the buffer of a slot that is not freed yet."""
    for number, part in enumerate(plan.classes):
        use = memory_use(part.slots, part.tasks)
        live: list[int] = []
        for task in part.tasks:
            for slot in task.writes:
                known = part.slots[slot]
                for other in live if known.pool >= 0 else ():
                    like = part.slots[other]
                    same = (like.shape, like.dtype, use[other])
                    if same == (known.shape, known.dtype, use[slot]):
                        changes = _with_pools(plan, number, {slot: like.pool})
                        yield fault(changes, "pools", task.name)
                if known.pool >= 0:
                    live.append(slot)
            live = [slot for slot in live if slot not in task.frees]


def unawaited_turn(plan: Plan) -> Iterator[Fault]:
    """The receives of a stream wait for nobody, so that none waits for its buffer."""
    for number, part in enumerate(plan.classes):
        if any(task.kind == "read" for task in part.tasks):
            continue  # the host waits
        for stream in sorted({t.stream for t in part.tasks if t.kind == "recv"}):
            tasks = list(part.tasks)
            mine = [i for i, t in enumerate(tasks) if t.stream == stream]
            buffers = [part.slots[w].pool for i in mine for w in tasks[i].writes]
            if any(tasks[i].kind != "recv" for i in mine) or len(set(buffers)) == len(buffers):
                continue
            names = [tasks[i].name for i in mine if tasks[i].waits]
            for i in mine:
                tasks[i] = msgspec.structs.replace(tasks[i], waits=())
            yield fault(with_tasks(plan, number, tasks), "pools", *names)


def unlike_buffer(plan: Plan) -> Iterator[Fault]:
    """A slot of another size or kind, or what a chunk writes, is put into a buffer."""
    for number, part in enumerate(plan.classes):
        pooled = {i: s for i, s in enumerate(part.slots) if s.pool >= 0}
        use = memory_use(part.slots, part.tasks) if pooled else []
        for task in part.tasks if pooled else ():
            for slot in task.writes:
                known = part.slots[slot]
                if known.base >= 0 or known.kind in ("param", "host"):
                    continue
                for like, other in list(pooled.items())[:3]:
                    wrong = task.kind == "run" or known.kind == "gathered"
                    if slot in pooled:
                        size = (known.shape, known.dtype, use[slot])
                        wrong = size != (other.shape, other.dtype, use[like])
                    if wrong:
                        changes = _with_pools(plan, number, {slot: other.pool})
                        yield fault(changes, "pools", task.name)


POOL_FAULTS: dict[str, Plant] = {
    plant.__name__: plant for plant in (shared_while_in_use, unawaited_turn, unlike_buffer)
}
