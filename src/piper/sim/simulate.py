"""simulate: a plan and what its tasks take in, the Timeline of some steps out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from piper.check.parties import Party, World, compressed, expanded
from piper.cost.machine import Machine
from piper.observe.timeline import Label, Timeline, Track
from piper.plan.held_by import held_by
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan
from piper.sim.disturbances import Disturbance, disturbed
from piper.sim.engine import ALONE, Engine, Meeting, Row
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
        self._needs: dict[int, list[tuple[int, ...]]] = {}
        self._members: dict[tuple[int, int], tuple[int, ...]] = {}
        self._labels: dict[int, tuple[Label, ...]] = {}
        rows = [self._row(number, party) for number, party in enumerate(world.parties)]
        self.engine = Engine(rows, self.meetings, host_computes=machine.host_computes)

    def _row(self, number: int, party: Party) -> Row:
        tasks = party.tasks
        meeting = [ALONE] * len(tasks)
        for index, task in enumerate(tasks):
            if isinstance(task, Comm):
                meeting[index] = self._meet(number, party, index, task)
        return Row(
            name=party.label,
            names=[task.name for task in tasks],
            seconds=self.costs.compute(party),
            host=[self.costs.host(task) for task in tasks],
            meeting=meeting,
            needs=self._needs_of(party),
            blocks=[task.blocks for task in tasks],
        )

    def _needs_of(self, party: Party) -> list[tuple[int, ...]]:
        """Earlier tasks of the row that each waits for; on a host that computes, communications."""
        known = self._needs.get(id(party.tasks))
        if known is None:
            tasks = party.tasks
            if self.machine.host_computes:
                talks = [isinstance(task, Comm) for task in tasks]
                holders = held_by(tasks, party.slots)
                known = [tuple(i for i in found if talks[i]) for found in holders]
            else:
                known = list(_in_order(tasks))
            self._needs[id(party.tasks)] = known
        return known

    def _meet(self, number: int, party: Party, index: int, task: Comm) -> int:
        """The number of a task's meeting, which it joins."""
        ranks = self._ranks(party, task.group)
        if self.world.by_rank:
            key: object = (task.meeting, ranks)
        else:
            key = task.key or (number, index)
        known = self.numbers.get(key)
        exchange = self.costs.exchange(party, task, ranks)
        if known is None:
            known = self.numbers[key] = len(self.meetings)
            holds = self.machine.holds_share and not task.facts.is_message
            self.meetings.append(Meeting(exchange.latency, exchange.seconds, exchange.share, holds))
        meeting = self.meetings[known]
        # The sending end knows how long a message takes, and the slowest member a collective.
        meeting.latency = max(meeting.latency, exchange.latency)
        meeting.seconds = max(meeting.seconds, exchange.seconds)
        meeting.members.append((number, index))
        return known

    def _ranks(self, party: Party, group: int) -> tuple[int, ...]:
        """The group that a party's first rank belongs to."""
        known = self._members.get((party.number, group))
        if known is None:
            plan = self.world.plan
            by_rank = self.world.by_rank
            rank = party.number if by_rank else next(iter(plan.mesh.ranks(party.slice)))
            known = plan.groups[group].ranks(plan.mesh, rank)
            self._members[party.number, group] = known
        return known

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
                track.which.extend(range(len(issued)))
                track.issued.extend(issued)
                track.start.extend(start)
                track.end.extend(end)
            ends = [max(end, default=begin) for end, begin in zip(times.end, begins, strict=True)]
            bounds.append((min(begins), max(ends)))
            begins = [end + self.machine.between for end in ends]
        return Timeline(
            "simulated",
            tracks,
            bounds,
            tuple(map(str, world.plan.history)),
            world.plan.content_hash(),
        )

    def _track(self, party: Party) -> Track:
        plan = self.world.plan
        if self.world.by_rank:
            ranks: tuple[int, ...] = (party.number,)
        else:
            ranks = tuple(plan.mesh.ranks(party.slice))
        if id(party.tasks) not in self._labels:
            self._labels[id(party.tasks)] = self._labels_of(party)
        return Track(party.label, ranks, self._labels[id(party.tasks)])

    def _labels_of(self, party: Party) -> tuple[Label, ...]:
        names = self.world.plan.streams
        return tuple(
            Label(
                t.name,
                t.kind,
                names[t.stream].name,
                phase=getattr(t, "phase", ""),
                tags=t.tags,
                origin=t.origin,
                meeting=t.meeting if isinstance(t, Comm) else "",
            )
            for t in party.tasks
        )


def _in_order(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """The task before it on its stream, and what it waits for."""
    last: dict[int, int] = defaultdict(lambda: -1)
    found = []
    for index, task in enumerate(tasks):
        before = last[task.stream]
        found.append(tuple(dict.fromkeys((*((before,) if before >= 0 else ()), *task.waits))))
        last[task.stream] = index
    return found
