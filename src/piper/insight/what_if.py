"""What if: a plan and what its tasks take, on a machine or in a timeline, in; how long a step would be,
if some were faster, out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from piper.check.parties import Party
from piper.cost.machine import Exchange, Machine
from piper.errors import FileError, did_you_mean
from piper.observe.timeline import Timeline
from piper.plan.tasks import Comm, Run, Task
from piper.plan.types import Plan
from piper.sim.measured_costs import MeasuredCosts, replayed
from piper.sim.simulate import simulate
from piper.sim.task_costs import MachineCosts, TaskCosts, meetings_of

Chosen = Callable[[Task], bool]


class WhatIf(msgspec.Struct, frozen=True):
    """A step as it is, and with what is chosen taking `factor` as long. Of a timeline, both are replayed
    from what its tasks took; a step of it took `recorded` seconds, and no replay of one is further than
    `off`, as a part of it, from the step itself."""

    what: str
    factor: float
    seconds: float
    changed: float
    tasks: int
    recorded: float | None = None
    off: float = 0.0

    @property
    def gain(self) -> float:
        """The part of the step that is saved."""
        return 1 - self.changed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        how = "free" if self.factor == 0 else f"{self.factor:g} x as long"
        more = "shorter" if self.gain >= 0 else "longer"
        return (
            f"with {self.what} ({self.tasks} tasks) {how} the step is {abs(self.gain):.1%} {more} "
            f"({self.seconds * 1e3:.2f} -> {self.changed * 1e3:.2f} ms)"
        )


@dataclass(frozen=True)
class _Changed:
    costs: TaskCosts
    chosen: Chosen
    meetings: frozenset[str]
    factor: float

    def compute(self, party: Party) -> list[float]:
        found = zip(party.tasks, self.costs.compute(party), strict=True)
        return [s * self.factor if self.chosen(task) else s for task, s in found]

    def exchange(self, party: Party, task: Comm, ranks: Sequence[int]) -> Exchange:
        found = self.costs.exchange(party, task, ranks)
        if task.meeting not in self.meetings:
            return found
        by = self.factor
        return replace(found, latency=found.latency * by, seconds=found.seconds * by)

    def host(self, task: Task) -> float:
        return self.costs.host(task)


def chosen_by(plan: Plan, text: str) -> Chosen:
    """Tasks by a kind (`all_to_all`), a phase (`BW`), a directive (`replicate`, or the line of one), or
    how their names begin; raises if there are none."""
    codes = (str(record).removeprefix("s.") for record in plan.history)
    line = text.removeprefix("s.")
    made = {number for number, code in enumerate(codes) if line and code.startswith(line)}

    def chosen(task: Task) -> bool:
        if text in (task.kind, getattr(task, "phase", "")):
            return True
        return (bool(text) and task.name.startswith(text)) or task.origin in made

    tasks = [task for found in plan.classes for task in found.tasks]
    if not any(map(chosen, tasks)):
        kinds = dict.fromkeys(task.kind for task in tasks)
        phases = dict.fromkeys(task.phase for task in tasks if isinstance(task, Run))
        known = [name for name in (*kinds, *phases) if name]
        raise FileError(
            f"no task is of the kind, phase or directive {text!r}, or has a name that begins so"
            f"{did_you_mean(text, known)}",
            legal=f"{', '.join(sorted(known))}; a directive, such as replicate; or a task's name",
        )
    return chosen


def what_if(
    plan: Plan, machine: Machine, what: str, factor: float = 0.0, *, costs: TaskCosts | None = None
) -> WhatIf:
    """On a machine: the second of two simulated steps, since the first has no other before it."""
    costs = costs or MachineCosts(plan, machine)
    chosen = chosen_by(plan, what)
    alone, changed = (
        simulate(plan, machine, steps=2, costs=each).step_seconds[1]
        for each in (costs, _Changed(costs, chosen, meetings_of(plan, chosen), factor))
    )
    return WhatIf(what, factor, alone, changed, _num_tasks(plan, chosen))


def what_if_replayed(
    plan: Plan,
    timeline: Timeline,
    what: str,
    factor: float = 0.0,
    *,
    steps: Sequence[int] | None = None,
) -> WhatIf:
    """In a timeline of the plan: every settled step, or each of `steps`, with what its own tasks took,
    and the median. What is usual for each task makes no usual step: someone is always late, and the
    others wait."""
    steps = timeline.settled if steps is None else steps
    chosen = chosen_by(plan, what)
    meetings = meetings_of(plan, chosen)
    alone, changed = [], []
    recorded = [timeline.step_seconds[step] for step in steps]
    for step in steps:
        costs = MeasuredCosts(plan, timeline, [step])
        alone.append(replayed(plan, timeline, costs).step_seconds[0])
        faster = _Changed(costs, chosen, meetings, factor)
        changed.append(replayed(plan, timeline, faster).step_seconds[0])
    return WhatIf(
        what,
        factor,
        median(alone),
        median(changed),
        _num_tasks(plan, chosen),
        median(recorded),
        max(_off(a, b) for a, b in zip(alone, recorded, strict=True)),
    )


def _off(replayed: float, recorded: float) -> float:
    if recorded:
        return abs(replayed / recorded - 1)
    return math.inf if replayed else 0.0


def _num_tasks(plan: Plan, chosen: Chosen) -> int:
    """Of all ranks."""
    return sum(
        plan.mesh.size_of(plan.mesh.free(found.slice)) * sum(map(chosen, found.tasks))
        for found in plan.classes
    )
