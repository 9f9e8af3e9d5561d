"""simulate: a plan and what its tasks take in, the Timeline of some steps out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from piper.check.parties import Party, World, compressed, expanded
from piper.cost.machine import Exchange, Machine
from piper.mesh import Slice
from piper.no_collections import no_collections
from piper.observe.timeline import Timeline, Track
from piper.plan.held_by import held_by
from piper.plan.report.task_labels import ClassLabels
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan, hash_of
from piper.sim.disturbances import Disturbance, Jitter, disturbed
from piper.sim.engine import ALONE, Engine, Meeting, Row, Work
from piper.sim.task_costs import MachineCosts, TaskCosts


def simulate(
    plan: Plan,
    machine: Machine,
    *,
    steps: int = 1,
    costs: TaskCosts | None = None,
    by_rank: bool = False,
    disturbances: Sequence[Disturbance] = (),
) -> Timeline:
    """What `steps` steps would look like: one track per class of ranks, or per rank where ranks of one
    class may differ."""
    costs = disturbed(plan, costs or MachineCosts(plan, machine), disturbances)
    redrawn = any(isinstance(found, Jitter) for found in disturbances)
    with no_collections():
        world = expanded(plan) if by_rank or disturbances else compressed(plan)
        return Simulation(world, machine, costs).timeline(steps, redrawn=redrawn)


class Simulation:
    def __init__(self, world: World, machine: Machine, costs: TaskCosts) -> None:
        self.world = world
        self.machine = machine
        self.costs = costs
        self.groups: dict[tuple[int, ...], _Group] = {}
        self.classes: dict[Slice, _Class] = {}
        self.found = {found.slice: found for found in world.plan.classes}
        self.engine = self._engine()

    def _engine(self) -> Engine:
        self.meetings: list[Meeting] = []
        self.numbers: dict[object, int] = {}  # of meetings
        rows = [self._row(number, party) for number, party in enumerate(self.world.parties)]
        machine = self.machine
        return Engine(rows, self.meetings, host_computes=machine.host_computes, lanes=machine.lanes)

    def _class(self, party: Party) -> _Class:
        known = self.classes.get(party.slice)
        if known is None:
            labels = ClassLabels(self.world.plan, self.found[party.slice])
            known = self.classes[party.slice] = _Class(party, self.machine, self.costs, labels)
        return known

    def _row(self, number: int, party: Party) -> Row:
        found, meetings, numbers = self._class(party), self.meetings, self.numbers
        meeting = [ALONE] * len(party.tasks)
        groups: dict[int, _Group] = {}
        for index, task, holds, brings in found.comms:
            group = groups.get(task.group)
            if group is None:
                group = groups[task.group] = self._group(party, task.group)
            if self.world.by_rank:
                key: object = (task.key or task.name, group.number)
            else:
                key = task.key or (number, index)
            joined = numbers.get(key)
            if joined is None:
                joined = numbers[key] = len(meetings)
                meetings.append(Meeting(0.0, 0.0, 0.0, holds))
            meeting[index] = joined
            meetings[joined].members.append((number, index))
            if task.facts.sends:
                meetings[joined].sender = number
            if brings:  # else the other end knows how long it takes
                _prolong(meetings[joined], self.costs.exchange(party, task, group.ranks))
        return Row(party.label, found.work, self.costs.compute(party), meeting)

    def _group(self, party: Party, group: int) -> _Group:
        """The one that a party's first rank belongs to; of a class, the first whose link is slowest."""
        plan = self.world.plan
        if self.world.by_rank:
            ranks = party.groups[group]
        else:
            ranks = plan.groups[group].ranks(plan.mesh, next(plan.mesh.ranks(party.slice)))
            ends = ranks[0], ranks[-1]
            for shift in plan.groups[group].shifts(plan.mesh, party.slice):
                if self.machine.link([rank + shift for rank in ends]) is self.machine.network:
                    ranks = tuple(rank + shift for rank in ranks)
                    break
        return self.groups.setdefault(ranks, _Group(len(self.groups), ranks))

    def timeline(self, steps: int, *, redrawn: bool = False) -> Timeline:
        """With costs that are `redrawn` each step asks for its own."""
        world = self.world
        tracks = [self._track(party) for party in world.parties]
        begins = [0.0] * len(tracks)
        bounds: list[tuple[float, float]] = []
        for step in range(steps):
            if step and redrawn:
                self.engine = self._engine()
            times = self.engine.run(begins)
            for track, issued, start, end in zip(
                tracks, times.issued, times.start, times.end, strict=True
            ):
                track.begins.append(len(track))
                track.which.extend(range(len(issued)))
                track.issued.extend(issued)
                track.start.extend(start)
                track.end.extend(end)
            ends = [max(end, default=begin) for end, begin in zip(times.end, begins, strict=True)]
            bounds.append((min(begins), max(ends)))
            begins = [end + self.machine.between for end in ends]
        plan_json = world.plan.to_json()
        return Timeline(
            "simulated",
            tracks,
            bounds,
            tuple(map(str, world.plan.history)),
            hash_of(plan_json),
            host_computes=self.machine.host_computes,
            plan_json=plan_json,
        )

    def _track(self, party: Party) -> Track:
        labels = self._class(party).labels
        if self.world.by_rank:
            return Track(party.label, (party.number,), labels.of_rank(party.number))
        ranks = tuple(self.world.plan.mesh.ranks(party.slice))
        return Track(party.label, ranks, labels.of_class)


class _Class:
    """What all parties of a class share."""

    def __init__(
        self, party: Party, machine: Machine, costs: TaskCosts, labels: ClassLabels
    ) -> None:
        tasks = party.tasks
        self.labels = labels
        self.work = Work(
            names=[task.name for task in tasks],
            host=[costs.host(task) for task in tasks],
            needs=_held(party) if machine.host_computes else in_order(tasks),
            blocks=[task.blocks for task in tasks],
        )
        # A host that computes takes part in communication only when bytes flow.
        holds = machine.holds_share and not machine.host_computes
        self.comms = [
            (index, task, holds and not task.facts.is_message, task.facts.brings)
            for index, task in enumerate(tasks)
            if isinstance(task, Comm)
        ]


class _Group(NamedTuple):
    """Ranks that meet, and their number among such groups."""

    number: int
    ranks: tuple[int, ...]


def _prolong(meeting: Meeting, found: Exchange) -> None:
    """The member that takes longest sets a meeting's time."""
    if found.latency > meeting.latency:
        meeting.latency = found.latency
    if found.seconds > meeting.seconds:
        meeting.seconds = found.seconds
    if found.share > meeting.share:
        meeting.share = found.share


def _held(party: Party) -> list[tuple[int, ...]]:
    """The communications that a host which computes itself has to see complete."""
    talks = [isinstance(task, Comm) for task in party.tasks]
    holders = held_by(party.tasks, party.slots)
    return [tuple(i for i in found if talks[i]) for found in holders]


def in_order(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """The task before it on its stream, and what it waits for."""
    last: dict[int, int] = defaultdict(lambda: -1)
    found = []
    for index, task in enumerate(tasks):
        before = last[task.stream]
        found.append(tuple(dict.fromkeys((*((before,) if before >= 0 else ()), *task.waits))))
        last[task.stream] = index
    return found
