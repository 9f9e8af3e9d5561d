"""events: whoever reads, overwrites or frees a slot does so surely after what must come before it."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.plan.tasks import sends


def events(world: World) -> Iterator[Problem]:
    """Reads that may start before the write, and writes or frees before an earlier read or write.

    A slot that shows a part of another one counts as that part. Of many readers on a stream only the
    last matters, since a stream is in order. A step begins when the last one is complete.
    """
    for party in world.distinct:
        yield from _races(world, party)


def _races(world: World, party: Party) -> Iterator[Problem]:
    local = world.local(party)
    before, stream, overlaps = local.before, local.stream, local.overlaps
    sending = {index for index, task in enumerate(party.tasks) if sends(task)}
    wrote = [-1] * len(party.slots)
    readers: list[dict[int, int]] = [{} for _ in party.slots]  # stream -> last reader since
    for index, task in enumerate(party.tasks):
        clock = before[index]
        found: dict[tuple[int, str], list[int]] = {}  # (earlier task, what) -> slots
        for slot in task.reads:
            for other in overlaps[slot]:
                by = wrote[other]
                if by >= 0 and by != index and clock[stream[by]] < by:
                    found.setdefault((by, "reads"), []).append(slot)
            readers[slot][stream[index]] = index
        for slots, what in ((task.writes, "overwrites"), (task.frees, "frees")):
            for slot in slots:
                for other in overlaps[slot]:
                    for by in (wrote[other], *readers[other].values()):
                        if by < 0 or by == index or clock[stream[by]] >= by:
                            continue
                        if what != "frees" or by not in sending:  # a send keeps what it sends
                            found.setdefault((by, what), []).append(slot)
                    if local.covers(slot, other):
                        wrote[other] = -1
                        readers[other].clear()
                wrote[slot] = index
        for (by, what), raced in found.items():
            names = ", ".join(dict.fromkeys(party.slots[s].name for s in raced))
            verb = "writes" if what == "reads" else "uses"
            text = f"{task.name} {what} {names} but does not wait for {party.tasks[by].name}"
            fact = f"which {verb} it on another stream: an event is missing"
            yield problem(world, "events", text, (party, index), (party, by), facts=(fact,))
