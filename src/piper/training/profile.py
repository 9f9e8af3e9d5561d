"""profile: a job and a batch in; what its machine can do, what its steps take there, and what the
simulator says of both, out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from piper.api.job import Job
from piper.cost.exchange_times import LinkTimes
from piper.cost.machine import Machine
from piper.cost.presets import MACHINES
from piper.insight.causes import Causes
from piper.insight.predictions import KindTime, by_kind
from piper.insight.suspects import Suspect, suspects
from piper.observe.timeline import Timeline
from piper.plan.report.track_memory import fill_memories
from piper.plan.tasks import Comm
from piper.plan.types import Plan
from piper.runtime.launch.launchers import pool_of
from piper.runtime.launch.pool import Pool
from piper.sim.calibration import with_links, with_rehearsals
from piper.sim.simulate import simulate

WARM = 3  # steps before any is measured


@dataclass(frozen=True)
class Profile:
    """A machine as it was measured, some steps on it, and the same steps as the simulator has them."""

    machine: Machine
    measured: Timeline
    predicted: Timeline
    kinds: list[KindTime]
    suspects: list[Suspect]

    @property
    def measured_seconds(self) -> float:
        return median(self.measured.step_seconds)

    @property
    def predicted_seconds(self) -> float:
        return self.predicted.step_seconds[-1]

    @property
    def error(self) -> float:
        """How far the prediction is off, of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1


def profile(
    job: Job,
    batch: Any,
    *,
    launch: str | Pool = "local",
    steps: int = 8,
    machine: Machine | None = None,
    **launch_options: Any,
) -> Profile:
    """Train `steps` steps on a batch and hold them to their prediction: by a `machine`, or one that is
    calibrated first (its links, and the job's tasks without communication). `launch` and
    `launch_options` are those of `job.launch`."""
    compiles = {name: launch_options[name] for name in ("compile",) if name in launch_options}
    found = pool_of(launch, job.plan, launch_options)
    with ExitStack() as stack:
        pool: Pool = found() if callable(found) else found
        if callable(found):
            stack.callback(pool.close)
        if machine is None:
            machine = calibrated(pool, (job, batch), steps=steps, **compiles)
        measured = recorded(job, batch, pool, steps=steps, **compiles)
    return compared(job, measured, machine)


def recorded(
    job: Job, batch: Any, pool: Pool, *, steps: int = 8, compile: bool = False
) -> Timeline:
    """Some steps on a batch, after a few that are not recorded."""
    with job.launch(pool, compile=compile) as run:
        for _ in range(WARM):
            run.step(batch)
        recording = run.record(steps)
        for _ in range(steps):
            run.step(batch)
    return recording.timeline


def compared(job: Job, measured: Timeline, machine: Machine) -> Profile:
    """Recorded steps and what is predicted for them."""
    predicted = simulate(job.plan, machine, steps=2)
    fill_memories(job.plan, predicted)
    typical = Causes(job.plan, measured, typical_step(measured))
    foreseen = Causes(job.plan, predicted)
    return Profile(
        machine, measured, predicted, by_kind(typical, foreseen), suspects(typical, foreseen)
    )


def calibrated(
    pool: Pool,
    *cases: tuple[Job, Any],
    steps: int = 8,
    machine: Machine | None = None,
    compile: bool = False,
) -> Machine:
    """The pool's machine: its links, unless a `machine` has them, and the bodies of jobs, each of which
    comes with a batch."""
    known = machine or linked(pool, *(job.plan for job, _ in cases))
    rehearsals = [
        (job.plan, job.rehearse(batch, pool, steps=steps, compile=compile)) for job, batch in cases
    ]
    return with_rehearsals(known, *rehearsals)


def linked(pool: Pool, *plans: Plan) -> Machine:
    """The pool's machine with its links, measured in groups such as those of the plans."""
    return with_groups(pool, collective_groups(*plans))


def with_groups(pool: Pool, groups: list[list[tuple[int, ...]]]) -> Machine:
    """The pool's machine with its links, measured in sets of groups that do not overlap."""
    times: list[LinkTimes] = pool.call("links", [groups] * len(pool.ranks))
    [device, *_] = pool.call("describe", [None] * len(pool.ranks))
    return with_links(base_machine(device["name"], float(device["part"])), times[0])


def collective_groups(*plans: Plan) -> list[list[tuple[int, ...]]]:
    """For each size, ranks that have collectives together: as many groups as do not overlap."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for plan in plans:
        for part in plan.classes:
            comms = (task for task in part.tasks if isinstance(task, Comm))
            used = {task.group for task in comms if not task.facts.is_message}
            for group in sorted(used):
                for rank in plan.mesh.ranks(part.slice):
                    ranks = plan.groups[group].ranks(plan.mesh, rank)
                    known = found.setdefault(len(ranks), [])
                    if not {r for each in known for r in each} & set(ranks):
                        known.append(ranks)
    return [groups for size, groups in found.items() if size > 1]


def base_machine(name: str, part: float = 1.0) -> Machine:
    """The preset of a device, or of a part of it; what is measured replaces its figures."""
    key = next((key for key in MACHINES if key in name.lower()), None)
    known = MACHINES[key or "h100"]
    if key is None:
        known = msgspec.structs.replace(known, name=name, source="figures of an h100")
    if part >= 1:
        return known
    return msgspec.structs.replace(
        known,
        flops={dtype: rate * part for dtype, rate in known.flops.items()},
        bandwidth=known.bandwidth * part,
        sms=int(known.sms * part),
        source=f"{part:.0%} of it; {known.source}",
    )


def typical_step(timeline: Timeline) -> int:
    """The number of the step whose time is the median."""
    order = sorted(range(len(timeline.steps)), key=lambda step: timeline.step_seconds[step])
    return order[len(order) // 2]
