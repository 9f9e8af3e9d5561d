"""Calibration: what a machine was measured to take in, the Machine that the simulator goes by out.

A rehearsal is a plan whose tasks ran on its ranks without communication: every body and every other
task has its time there, beside the same neighbours as in a real run. Times are means: a step has many
tasks, and what they take together counts, interruptions too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, median

import msgspec

from piper.check.parties import compressed
from piper.cost.exchange_times import LinkTimes, curves, fitted
from piper.cost.machine import Linear, Link, Machine
from piper.observe.timeline import Timeline
from piper.plan.tasks import Calling, Comm
from piper.plan.types import Plan
from piper.sim.task_costs import touched_bytes

_CALIBRATED = "calibrated; what was not measured: "


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


def with_rehearsals(machine: Machine, *rehearsals: tuple[Plan, Timeline]) -> Machine:
    """The machine with the bodies of plans, and their other kinds of tasks, as they were measured. What
    several plans have, in whatever company, has one time."""
    found = _Found()
    for plan, rehearsal in rehearsals:
        found.add(plan, rehearsal)
    return msgspec.structs.replace(
        machine,
        bodies=machine.bodies | {body: fmean(times) for body, times in found.bodies.items()},
        kinds=machine.kinds | {kind: _line(sizes) for kind, sizes in found.kinds.items()},
        between=max(0.0, median(found.between)) if found.between else machine.between,
        source=_CALIBRATED + machine.source.removeprefix(_CALIBRATED),
    )


class _Found:
    """Seconds of bodies, of other kinds of tasks by the bytes that they touch, and between steps."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[float]] = defaultdict(list)
        self.kinds: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.between: list[float] = []

    def add(self, plan: Plan, rehearsal: Timeline) -> None:
        parties = {party.slice: party for party in compressed(plan).parties}
        for track in rehearsal.tracks:
            at = plan.mesh.coordinates(track.ranks[0])
            party = next(
                party
                for found, party in parties.items()
                if all(at[axis] == index for axis, index in found.fixed)
            )
            sizes = [touched_bytes(party, task) for task in party.tasks]
            for index, which in enumerate(track.which):
                task, seconds = party.tasks[which], track.end[index] - track.start[index]
                if isinstance(task, Calling):
                    self.bodies[task.body].append(seconds)
                elif not isinstance(task, Comm):
                    self.kinds[task.kind][sizes[which]].append(seconds)
        steps = zip(rehearsal.steps, rehearsal.steps[1:], strict=False)
        self.between += [begin - end for (_, end), (begin, _) in steps]


def _line(sizes: Mapping[float, list[float]]) -> Linear:
    """Through what tasks of each size took, so that all of them together take as long as they did."""
    line = fitted([(size, fmean(seconds)) for size, seconds in sizes.items()])
    took = sum(fmean(seconds) * len(seconds) for seconds in sizes.values())
    foreseen = sum(line(size) * len(seconds) for size, seconds in sizes.items())
    scale = took / foreseen if foreseen else 1.0
    return Linear(line.fixed * scale, line.per_byte * scale)
