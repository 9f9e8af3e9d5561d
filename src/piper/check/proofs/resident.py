"""resident: communication kernels that wait for others all fit on a device at once.

A kernel that waits for its peers keeps its place on the device; were there more of them than places, one
that all others wait for might never start. Sends are buffered and wait for nobody. Streams are in order,
so that two kernels can wait at once only if they are on different streams and neither is known to be
complete before the other starts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from piper.check.parties import World
from piper.check.problem import Problem, problem
from piper.plan.local_order import Local
from piper.plan.tasks import Comm

MAX_RESIDENT = 16


def resident(world: World) -> Iterator[Problem]:
    """Ranks on which too many kernels could wait at once; a CPU has no such places."""
    if world.plan.device == "cpu":
        return
    for party in world.distinct:
        most, tasks = most_resident(world.local(party))
        if most > MAX_RESIDENT:
            text = f"{party.label}: {most} communications may wait at once"
            facts = (f"a device has places for {MAX_RESIDENT}",)
            yield problem(world, "resident", text, *((party, t) for t in tasks), facts=facts)


def most_resident(local: Local) -> tuple[int, list[int]]:
    """No more communications than this can wait at once; and which these could be."""
    waiting: dict[int, list[int]] = {}
    for index, task in enumerate(local.tasks):
        if isinstance(task, Comm) and task.facts.waits_for_peers:
            waiting.setdefault(local.stream[index], []).append(index)
    most, tasks = len(waiting), [found[0] for found in waiting.values()]
    if most <= MAX_RESIDENT:
        return most, tasks
    most, tasks = 0, []
    for stream, mine in waiting.items():
        for index in mine:
            beside = [index]
            for other, theirs in waiting.items():
                if other != stream:
                    at = bisect.bisect_right(theirs, local.before[index][other])
                    if at < len(theirs) and not (
                        theirs[at] > index and local.ordered(index, theirs[at])
                    ):
                        beside.append(theirs[at])
            if len(beside) > most:
                most, tasks = len(beside), beside
    return most, tasks
