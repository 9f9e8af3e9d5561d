"""Disturbances: what is slower than it should be, and who; TaskCosts in, slower ones out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from piper.check.parties import Party
from piper.cost.machine import Exchange
from piper.plan.tasks import Calling, Comm, Task
from piper.sim.task_costs import TaskCosts


@dataclass(frozen=True)
class SlowRank:
    """All that a rank computes takes `factor` as long."""

    rank: int
    factor: float


@dataclass(frozen=True)
class SlowLink:
    """All communication in which both of two ranks take part takes `factor` as long."""

    ranks: tuple[int, int]
    factor: float


@dataclass(frozen=True)
class SlowBody:
    """A body, or all tasks whose names begin so, takes `factor` as long."""

    body: str
    factor: float


@dataclass(frozen=True)
class Jitter:
    """Every task takes longer by a random part of itself, exponential with this mean."""

    mean: float
    seed: int = 0


Disturbance = SlowRank | SlowLink | SlowBody | Jitter


@dataclass(frozen=True)
class Disturbed:
    """The costs of another, with disturbances."""

    costs: TaskCosts
    ranks: dict[int, float]
    links: tuple[SlowLink, ...]
    bodies: tuple[SlowBody, ...]
    jitter: float
    chance: random.Random = field(default_factory=random.Random)

    def compute(self, party: Party) -> list[float]:
        factor = self.ranks.get(party.number, 1.0)
        alone = zip(party.tasks, self.costs.compute(party), strict=True)
        return [self._shaken(seconds * factor * self._slowed(task)) for task, seconds in alone]

    def _slowed(self, task: Task) -> float:
        factor = 1.0
        for slow in self.bodies:
            if task.name.startswith(slow.body) or (
                isinstance(task, Calling) and task.body == slow.body
            ):
                factor *= slow.factor
        return factor

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        found = self.costs.exchange(party, task, ranks)
        factor = self._shaken(1.0)
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


def disturbed(costs: TaskCosts, disturbances: Sequence[Disturbance]) -> TaskCosts:
    if not disturbances:
        return costs
    jitters = [found for found in disturbances if isinstance(found, Jitter)]
    return Disturbed(
        costs,
        {found.rank: found.factor for found in disturbances if isinstance(found, SlowRank)},
        tuple(found for found in disturbances if isinstance(found, SlowLink)),
        tuple(found for found in disturbances if isinstance(found, SlowBody)),
        sum(found.mean for found in jitters),
        random.Random(jitters[0].seed if jitters else 0),
    )
