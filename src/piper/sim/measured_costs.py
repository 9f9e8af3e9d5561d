"""Measured costs: a plan and a timeline of it in; what its tasks took, for the engine to replay, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import Any

from piper.check.parties import Party, compressed, expanded
from piper.cost.machine import Exchange, Link, Machine
from piper.observe.flows import Place
from piper.observe.meetings import Meetings
from piper.observe.timeline import Timeline
from piper.plan.held_by import held_by
from piper.plan.tasks import Calling, Comm, Task
from piper.plan.types import Plan, RankClass, class_of
from piper.sim.simulate import in_order, simulate
from piper.sim.task_costs import TaskCosts, touched_bytes
from piper.sim.timeline_classes import classes_of

_NOTHING = Link(0.0, 1e18)


class MeasuredCosts:
    """Of each task of each rank, the median over some steps. Communication takes from the last
    member's coming to its end, whatever went on beside it. A start that came later than all that it
    waited for counts to its task."""

    def __init__(self, plan: Plan, timeline: Timeline, steps: Iterable[int]) -> None:
        self.plan = plan
        hosts: dict[int, list[float]] = defaultdict(list)
        exchanged: dict[str, list[float]] = defaultdict(list)
        owns: dict[int, list[list[float]]] = defaultdict(list)
        lates: dict[int, list[list[float]]] = defaultdict(list)
        classes = classes_of(plan, timeline)
        self.by_rank = _is_by_rank(plan, timeline)
        for step in steps:
            meetings = Meetings(timeline, step)
            for number, (track, found) in enumerate(zip(timeline.tracks, classes, strict=True)):
                rank = track.ranks[0]
                times = _TrackTimes(meetings, number, found, timeline.steps[step][0])
                owns[rank].append(times.alone)
                lates[rank].append(times.late)
                for task, seconds in zip(found.tasks, times.host, strict=True):
                    hosts[id(task)].append(seconds)
                for name, seconds in times.exchanges:
                    exchanged[name].append(seconds)
        # By the first rank of a track: seconds of tasks, and how much later than it could each starts
        self.own = {rank: _medians(found) for rank, found in owns.items()}
        self.late = {rank: _medians(found) for rank, found in lates.items()}
        self.hosts = {task: median(found) for task, found in hosts.items()}
        self.exchanges = {name: median(found) for name, found in exchanged.items()}

    def rank(self, party: Party) -> int:
        """The first, or the only one, of a party."""
        return party.number if self.by_rank else next(iter(self.plan.mesh.ranks(party.slice)))

    def compute(self, party: Party) -> list[float]:
        rank = self.rank(party)
        return [own + late for own, late in zip(self.own[rank], self.late[rank], strict=True)]

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        return Exchange(self.exchanges[task.meeting + (f"@{ranks[0]}" if self.by_rank else "")])

    def host(self, task: Task) -> float:
        return self.hosts[id(task)]


class TypicalCosts:
    """What the same code, and the same communication, takes on most ranks: of a recording, what each of
    its spans is held to where nothing was predicted."""

    def __init__(self, measured: MeasuredCosts) -> None:
        self.measured = measured
        plan = measured.plan
        bodies: dict[Any, list[float]] = defaultdict(list)
        links: dict[Any, list[float]] = defaultdict(list)
        world = expanded(plan) if measured.by_rank else compressed(plan)
        for party in world.parties:
            rank = measured.rank(party)
            for task, seconds in zip(party.tasks, measured.own[rank], strict=True):
                if isinstance(task, Comm):
                    ranks = plan.groups[task.group].ranks(plan.mesh, rank)
                    found = measured.exchange(party, task, ranks).latency
                    links[_way(party, task, ranks)].append(found)
                else:
                    bodies[_work(party, task)].append(seconds)
        self.bodies = {key: median_low(found) for key, found in bodies.items()}
        self.links = {key: median_low(found) for key, found in links.items()}

    def compute(self, party: Party) -> list[float]:
        return [
            0.0 if isinstance(task, Comm) else self.bodies[_work(party, task)]
            for task in party.tasks
        ]

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        return Exchange(self.links[_way(party, task, ranks)])

    def host(self, task: Task) -> float:
        return self.measured.host(task)


def _replay_machine(timeline: Timeline) -> Machine:
    """Where tasks take what they took: nothing is shared that was not shared then."""
    return Machine(
        "recording",
        {"float32": 1.0},
        1.0,
        _NOTHING,
        _NOTHING,
        1 << 30,
        host_computes=timeline.host_computes,
        holds_share=False,
    )


def replayed(plan: Plan, timeline: Timeline, costs: TaskCosts) -> Timeline:
    """One step of a plan on the machine of a timeline, with costs that were taken from it."""
    by_rank = _is_by_rank(plan, timeline)
    return simulate(plan, _replay_machine(timeline), costs=costs, by_rank=by_rank)


def _is_by_rank(plan: Plan, timeline: Timeline) -> bool:
    """Whether tracks are those of ranks, whose meetings say who meets; else they are of classes."""
    for track in timeline.tracks:
        for label, task in zip(track.labels, class_of(plan, track.ranks[0]).tasks, strict=True):
            if isinstance(task, Comm):
                return label.meeting != task.meeting
    return all(len(track.ranks) == 1 for track in timeline.tracks)


class _TrackTimes:
    """What the tasks of one track took in one step."""

    def __init__(self, meetings: Meetings, number: int, found: RankClass, begin: float) -> None:
        self.meetings, self.number, self.begin = meetings, number, begin
        self.track = meetings.timeline.tracks[number]
        self.spans = meetings.spans[number]
        self.tasks = found.tasks
        self.talks = [isinstance(task, Comm) for task in found.tasks]
        self.on_host = meetings.host_computes
        self.needs = held_by(found.tasks, found.slots) if self.on_host else in_order(found.tasks)
        self.late = [self._late(index) for index in range(len(self.tasks))]
        self.alone = self._alone()
        self.host = [self._host(index) for index in range(len(self.tasks))]
        self.exchanges = list(self._exchanges())

    def _late(self, index: int) -> float:
        """How much later a task starts than the host and all that it waits for allow."""
        first, track = self.spans.start, self.track
        ready = self.begin if self.on_host else track.issued[first + index]
        for need in self.needs[index]:
            ready = max(ready, self.meetings.ended(Place(self.number, first + need)))
        if self.on_host and index:
            ready = max(ready, self._through(first + index - 1))
        return max(0.0, track.start[first + index] - ready)

    def _through(self, span: int) -> float:
        """When a host that computes was through with a task."""
        talks = self.talks[span - self.spans.start]
        return self.track.issued[span] if talks else self.track.end[span]

    def _host(self, index: int) -> float:
        """The host's own part: of a communication if it computes, else of every task."""
        span, track = self.spans.start + index, self.track
        if self.on_host:
            if not self.talks[index]:
                return 0.0
            return max(0.0, track.issued[span] - track.start[span]) + self.late[index]
        if not index:
            return max(0.0, track.issued[span] - self.begin)
        before = track.end if self.tasks[index - 1].blocks else track.issued
        return max(0.0, track.issued[span] - before[span - 1])

    def _alone(self) -> list[float]:
        """The seconds of what computes; what streams of a device do at once takes its share of them."""
        first, track = self.spans.start, self.track
        own = [0.0] * len(self.tasks)
        moments = []
        for index, talks in enumerate(self.talks):
            span = first + index
            if talks:
                continue
            own[index] = track.end[span] - track.start[span]
            if own[index] > 0 and not self.on_host:
                moments += [(track.start[span], 1, index), (track.end[span], -1, index)]
        if self.on_host:
            return own
        active, shared, last = 0, 0.0, 0.0
        for time, change, index in sorted(moments):
            shared += (time - last) / active if active else 0.0
            last = time
            active += change
            own[index] = shared - own[index] if change < 0 else shared
        return own

    def _exchanges(self) -> Iterable[tuple[str, float]]:
        """Of the communications for which this track came last."""
        for index, talks in enumerate(self.talks):
            place = Place(self.number, self.spans.start + index)
            if talks and self.meetings.last_to_come(place) == place:
                took = max(0.0, self.meetings.ended(place) - self.meetings.came(place))
                late = 0.0 if self.on_host else self.late[index]
                label = self.track.labels[self.track.which[place.span]]
                yield label.meeting, took + late


def _medians(steps: list[list[float]]) -> list[float]:
    return [median(found) for found in zip(*steps, strict=True)]


def _work(party: Party, task: Task) -> object:
    """What tasks with the same code on as many bytes have in common."""
    if isinstance(task, Calling):
        return task.body
    return task.kind, touched_bytes(party, task)


def _way(party: Party, task: Comm, ranks: Sequence[int]) -> object:
    """What communications of one kind that carry the same have in common."""
    slots = (party.slots[slot].type.nbytes for slot in (task.source, task.target) if slot >= 0)
    return task.comm, len(ranks), max(slots, default=0)
