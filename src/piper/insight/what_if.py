"""What if: a plan and what its tasks take in; how long a step would be if some were faster, out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from piper.check.parties import Party
from piper.cost.machine import Exchange, Machine
from piper.plan.tasks import Comm, Task
from piper.plan.types import Plan
from piper.sim.simulate import simulate
from piper.sim.task_costs import MachineCosts, TaskCosts

Chosen = Callable[[Task], bool]


class WhatIf(msgspec.Struct, frozen=True):
    """A step as it is, and with what is chosen taking `factor` as long."""

    what: str
    factor: float
    seconds: float
    changed: float
    tasks: int

    @property
    def gain(self) -> float:
        """The part of the step that is saved."""
        return 1 - self.changed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        how = "free" if self.factor == 0 else f"{self.factor:g} x as long"
        more = "shorter" if self.gain >= 0 else "longer"
        return (
            f"with {self.what} ({self.tasks} tasks) {how}, the step is {abs(self.gain):.1%} {more}: "
            f"{self.changed * 1e3:.3f} instead of {self.seconds * 1e3:.3f} ms"
        )


@dataclass(frozen=True)
class _Changed:
    costs: TaskCosts
    chosen: Chosen
    factor: float

    def compute(self, party: Party) -> list[float]:
        found = zip(party.tasks, self.costs.compute(party), strict=True)
        return [s * self.factor if self.chosen(task) else s for task, s in found]

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        found = self.costs.exchange(party, task, ranks)
        if not self.chosen(task):
            return found
        by = self.factor
        return replace(found, latency=found.latency * by, seconds=found.seconds * by)

    def host(self, task: Task) -> float:
        return self.costs.host(task)


def chosen_by(plan: Plan, text: str) -> Chosen:
    """Tasks by a kind (`all_to_all`), a phase (`BW`), a directive (`replicate`), or how their names
    begin."""
    codes = (str(record).removeprefix("s.") for record in plan.history)
    made = {number for number, code in enumerate(codes) if code.startswith(text)}

    def chosen(task: Task) -> bool:
        if text in (task.kind, getattr(task, "phase", "")):
            return True
        return task.name.startswith(text) or task.origin in made

    return chosen


def what_if(
    plan: Plan, machine: Machine, what: str, factor: float = 0.0, *, costs: TaskCosts | None = None
) -> WhatIf:
    """Simulate a step twice; the second of two, since the first has no other before it."""
    costs = costs or MachineCosts(plan, machine)
    chosen = chosen_by(plan, what)
    tasks = sum(chosen(task) for found in plan.classes for task in found.tasks)
    alone = simulate(plan, machine, steps=2, costs=costs).step_seconds[1]
    changed = simulate(plan, machine, steps=2, costs=_Changed(costs, chosen, factor))
    return WhatIf(what, factor, alone, changed.step_seconds[1], tasks)
