"""Disturbances: what is slower than it should be, and who; TaskCosts in, slower ones out."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from piper.check.parties import Party
from piper.cost.machine import Exchange
from piper.errors import FileError, did_you_mean
from piper.plan.tasks import Calling, Comm, Task
from piper.plan.types import Plan, class_of
from piper.sim.task_costs import TaskCosts, meetings_of


@dataclass(frozen=True)
class SlowRank:
    """All that a rank computes takes `factor` as long."""

    rank: int
    factor: float

    def __post_init__(self) -> None:
        _check_factor(f"rank {self.rank}", self.factor)


@dataclass(frozen=True)
class SlowLink:
    """All communication in which both of two ranks take part takes `factor` as long."""

    ranks: tuple[int, int]
    factor: float

    def __post_init__(self) -> None:
        _check_factor(f"the link of ranks {self.ranks[0]} and {self.ranks[1]}", self.factor)


@dataclass(frozen=True)
class SlowBody:
    """A body, or all tasks whose names begin so, takes `factor` as long."""

    body: str
    factor: float

    def __post_init__(self) -> None:
        _check_factor(f"body {self.body!r}", self.factor)

    def takes(self, task: Task) -> bool:
        return task.name.startswith(self.body) or (
            isinstance(task, Calling) and task.body == self.body
        )


@dataclass(frozen=True)
class Jitter:
    """Every task of every step takes longer by a random part of itself, exponential with this mean."""

    mean: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise FileError(f"a jitter of {self.mean:g}", legal="0 or more, such as 0.1")


Disturbance = SlowRank | SlowLink | SlowBody | Jitter


def _check_factor(what: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise FileError(f"{what} takes {factor:g} x as long", legal="more than 0, such as 1.5")


@dataclass(frozen=True)
class Disturbed:
    """The costs of another, with disturbances."""

    costs: TaskCosts
    ranks: dict[int, float]
    links: tuple[SlowLink, ...]
    bodies: tuple[
        tuple[SlowBody, frozenset[str]], ...
    ]  # each with the communications that it slows
    jitter: float
    chance: random.Random = field(default_factory=random.Random)

    def compute(self, party: Party) -> list[float]:
        factor = self.ranks.get(party.number, 1.0)
        alone = zip(party.tasks, self.costs.compute(party), strict=True)
        return [self._shaken(seconds * factor * self._slowed(task)) for task, seconds in alone]

    def _slowed(self, task: Task) -> float:
        factor = 1.0
        for slow, meetings in self.bodies:
            if task.meeting in meetings if isinstance(task, Comm) else slow.takes(task):
                factor *= slow.factor
        return factor

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        found = self.costs.exchange(party, task, ranks)
        factor = self._shaken(self._slowed(task))
        for slow in self.links:
            if set(slow.ranks) <= set(ranks):
                factor *= slow.factor
        return replace(found, latency=found.latency * factor, seconds=found.seconds * factor)

    def host(self, task: Task) -> float:
        return self.costs.host(task)

    def _shaken(self, seconds: float) -> float:
        if not self.jitter:
            return seconds
        return seconds * (1.0 + self.chance.expovariate(1.0 / self.jitter))


def disturbed(plan: Plan, costs: TaskCosts, disturbances: Sequence[Disturbance]) -> TaskCosts:
    """Raises if one of them disturbs nothing of the plan."""
    if not disturbances:
        return costs
    ranks: dict[int, float] = defaultdict(lambda: 1.0)
    links, bodies, jitters = [], [], []
    for found in disturbances:
        if isinstance(found, SlowRank):
            _check_rank(plan, found.rank)
            ranks[found.rank] *= found.factor
        elif isinstance(found, SlowLink):
            _check_link(plan, found)
            links.append(found)
        elif isinstance(found, SlowBody):
            _check_body(plan, found)
            bodies.append((found, meetings_of(plan, found.takes)))
        else:
            jitters.append(found)
    return Disturbed(
        costs,
        ranks,
        tuple(links),
        tuple(bodies),
        sum(found.mean for found in jitters),
        random.Random(jitters[0].seed if jitters else 0),
    )


def _check_rank(plan: Plan, rank: int) -> None:
    if not 0 <= rank < plan.mesh.size:
        raise FileError(f"the plan has no rank {rank}", legal=f"0 to {plan.mesh.size - 1}")


def _check_link(plan: Plan, slow: SlowLink) -> None:
    one, other = slow.ranks
    for rank in slow.ranks:
        _check_rank(plan, rank)
    groups = {task.group for task in class_of(plan, one).tasks if isinstance(task, Comm)}
    peers = {rank for group in groups for rank in plan.groups[group].ranks(plan.mesh, one)}
    if one == other or other not in peers:
        met = sorted(peers - {one})
        some = ", ".join(map(str, met[:8])) + (", ..." if len(met) > 8 else "")
        raise FileError(
            f"ranks {one} and {other} never meet", legal=f"rank {one} meets {some or 'no other'}"
        )


def _check_body(plan: Plan, slow: SlowBody) -> None:
    tasks = [task for found in plan.classes for task in found.tasks]
    if not slow.body or not any(map(slow.takes, tasks)):
        known = list(dict.fromkeys(task.name for task in tasks))
        raise FileError(
            f"no body is {slow.body!r}, and no task has a name that begins so"
            f"{did_you_mean(slow.body, known)}",
            legal=f"how a task's name begins, such as {known[0]}",
        )
