"""simulate: a plan and what its tasks take in, the Timeline of some steps out."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

from piper.check.parties import Party, World, compressed, expanded
from piper.cost.machine import Machine
from piper.observe.timeline import Timeline, Track
from piper.plan.held_by import held_by
from piper.plan.report.task_labels import labels_of
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan, hash_of
from piper.sim.disturbances import Disturbance, disturbed
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
    world = expanded(plan) if by_rank or disturbances else compressed(plan)
    costs = costs or MachineCosts(plan, machine)
    return _Simulation(world, machine, disturbed(costs, disturbances)).timeline(steps)


class _Simulation:
    def __init__(self, world: World, machine: Machine, costs: TaskCosts) -> None:
        self.world = world
        self.machine = machine
        self.costs = costs
        self.meetings: list[Meeting] = []
        self.numbers: dict[object, int] = {}
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.classes: dict[int, _Class] = {}
        self.found = {found.slice: found for found in world.plan.classes}
        rows = [self._row(number, party) for number, party in enumerate(world.parties)]
        self.engine = Engine(rows, self.meetings, host_computes=machine.host_computes)

    def _class(self, party: Party) -> _Class:
        known = self.classes.get(id(party.tasks))
        if known is None:
            known = self.classes[id(party.tasks)] = _Class(self, party)
        return known

    def _row(self, number: int, party: Party) -> Row:
        found = self._class(party)
        meeting = [ALONE] * len(party.tasks)
        groups: dict[int, tuple[int, ...]] = {}
        for index, task, brings in found.comms:
            ranks = groups.get(task.group)
            if ranks is None:
                ranks = groups[task.group] = self._ranks(party, task.group)
            meeting[index] = self._meet(number, party, index, task, ranks, brings)
        return Row(party.label, found.work, self.costs.compute(party), meeting)

    def _meet(
        self,
        number: int,
        party: Party,
        index: int,
        task: Comm,
        ranks: tuple[int, ...],
        brings: bool,
    ) -> int:
        """The number of a task's meeting, which it joins."""
        if self.world.by_rank:
            key: object = (task.key or task.name, ranks)
        else:
            key = task.key or (number, index)
        known = self.numbers.get(key)
        if known is None:
            known = self.numbers[key] = len(self.meetings)
            holds = self.machine.holds_share and not task.facts.is_message
            self.meetings.append(Meeting(0.0, 0.0, 0.0, holds))
        meeting = self.meetings[known]
        meeting.members.append((number, index))
        if brings:  # else the other end knows how long it takes
            found = self.costs.exchange(party, task, ranks)
            meeting.latency = max(meeting.latency, found.latency)
            meeting.seconds = max(meeting.seconds, found.seconds)
            meeting.share = max(meeting.share, found.share)
        return known

    def _ranks(self, party: Party, group: int) -> tuple[int, ...]:
        """The group that a party's first rank belongs to; equal ones are one object."""
        plan = self.world.plan
        by_rank = self.world.by_rank
        rank = party.number if by_rank else next(iter(plan.mesh.ranks(party.slice)))
        found = plan.groups[group].ranks(plan.mesh, rank)
        return self._members.setdefault(found, found)

    def timeline(self, steps: int) -> Timeline:
        world = self.world
        tracks = [self._track(party) for party in world.parties]
        begins = [0.0] * len(tracks)
        bounds: list[tuple[float, float]] = []
        for _ in range(steps):
            times = self.engine.run(begins)
            for track, issued, start, end in zip(
                tracks, times.issued, times.start, times.end, strict=True
            ):
                track.begins.append(len(track))
                track.which.extend(array("I", range(len(issued))))
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
        plan = self.world.plan
        if self.world.by_rank:
            ranks: tuple[int, ...] = (party.number,)
        else:
            ranks = tuple(plan.mesh.ranks(party.slice))
        found = self.found[party.slice]
        rank = party.number if self.world.by_rank else None
        return Track(party.label, ranks, labels_of(plan, found, rank=rank))


class _Class:
    """What all parties with the same tasks share."""

    def __init__(self, simulation: _Simulation, party: Party) -> None:
        tasks, costs = party.tasks, simulation.costs
        self.work = Work(
            names=[task.name for task in tasks],
            host=[costs.host(task) for task in tasks],
            needs=_held(party) if simulation.machine.host_computes else in_order(tasks),
            blocks=[task.blocks for task in tasks],
        )
        self.comms = [
            (index, task, task.facts.brings)
            for index, task in enumerate(tasks)
            if isinstance(task, Comm)
        ]


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
