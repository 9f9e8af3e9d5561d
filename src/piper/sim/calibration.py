"""Calibration: what a machine was measured to take in, the Machine that the simulator goes by out.

A rehearsal is a plan whose tasks ran on its ranks without communication: every body and every other
task has its time there, beside the same neighbours as in a real run.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import msgspec

from piper.check.parties import compressed
from piper.cost.exchange_times import LinkTimes, curves, fitted, usual
from piper.cost.machine import Link, Machine
from piper.observe.timeline import Timeline
from piper.plan.tasks import Calling, Comm
from piper.plan.types import Plan
from piper.sim.task_costs import touched_bytes


def with_links(machine: Machine, times: LinkTimes) -> Machine:
    """The machine with its links as they were measured."""
    if not times.exchanges:
        return machine  # one rank has none
    changes: dict[str, object] = {
        "exchange": times.issue,
        "lanes": times.lanes,
        "exchanges": machine.exchanges | curves(times.exchanges, times.shares),
    }
    if times.ranks_per_node is not None:
        changes["ranks_per_node"] = times.ranks_per_node
    for name, across in (("node", False), ("network", True)):
        found = (each for each in times.exchanges if each.kind == "send" and each.across == across)
        messages = [(each.carried, each.seconds) for each in found]
        if messages:
            line = fitted(messages)
            bandwidth = 1 / line.per_byte if line.per_byte else 1e15
            changes[name] = Link(line.fixed, bandwidth, times.shares.get("send", 0.0))
    return msgspec.structs.replace(machine, **changes)


def with_rehearsal(machine: Machine, plan: Plan, rehearsal: Timeline) -> Machine:
    """The machine with the bodies of a plan, and its other kinds of tasks, as they were measured."""
    bodies: dict[str, list[float]] = defaultdict(list)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    parties = {party.slice: party for party in compressed(plan).parties}
    for track in rehearsal.tracks:
        at = plan.mesh.coordinates(track.ranks[0])
        party = next(
            party
            for found, party in parties.items()
            if all(at[axis] == index for axis, index in found.fixed)
        )
        spans: dict[int, list[float]] = defaultdict(list)
        for index, which in enumerate(track.which):
            spans[which].append(track.end[index] - track.start[index])
        for which, seconds in spans.items():
            task = party.tasks[which]
            if isinstance(task, Calling):
                bodies[task.body] += seconds
            elif not isinstance(task, Comm):
                points[task.kind].append((touched_bytes(party, task), usual(seconds)))
    kinds = {kind: fitted(found) for kind, found in points.items()}
    between = [
        begin - end
        for (_, end), (begin, _) in zip(rehearsal.steps, rehearsal.steps[1:], strict=False)
    ]
    return msgspec.structs.replace(
        machine,
        bodies=machine.bodies | {body: usual(found) for body, found in bodies.items()},
        kinds=machine.kinds | kinds,
        between=max(0.0, median(between)) if between else machine.between,
        source=f"calibrated, from {machine.name}",
    )
