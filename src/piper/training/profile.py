"""profile: a job and a batch in; what its machine can do, what its steps take there, and what the
simulator says of both, out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import torch

from piper.api.job import Job
from piper.cost.machine import Machine
from piper.cost.presets import MACHINES
from piper.insight.causes import Causes
from piper.insight.predictions import KindTime, by_kind
from piper.insight.suspects import Suspect, suspects
from piper.observe.timeline import Timeline
from piper.runtime.launch.launchers import pool_of
from piper.runtime.launch.pool import Pool
from piper.sim.calibration import with_links, with_rehearsal
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
            machine = calibrated(job, batch, pool, steps=steps, **compiles)
        with job.launch(pool, **compiles) as run:
            for _ in range(WARM):
                run.step(batch)
            recording = run.record(steps)
            for _ in range(steps):
                run.step(batch)
    measured = recording.timeline
    predicted = simulate(job.plan, machine, steps=2)
    typical = Causes(job.plan, measured, typical_step(measured))
    foreseen = Causes(job.plan, predicted)
    return Profile(
        machine, measured, predicted, by_kind(typical, foreseen), suspects(typical, foreseen)
    )


def calibrated(
    job: Job,
    batch: Any,
    pool: Pool,
    *,
    steps: int = 8,
    machine: Machine | None = None,
    **options: Any,
) -> Machine:
    """The pool's machine: its links, unless a `machine` has them, and the bodies of a job."""
    if machine is None:
        [*links] = pool.call("links", [None] * len(pool.ranks))
        machine = with_links(base_machine(job.plan.device), links[0])
    return with_rehearsal(machine, job.plan, job.rehearse(batch, pool, steps=steps, **options))


def base_machine(device: str) -> Machine:
    """The preset that comes nearest; what is measured replaces its figures."""
    if device == "cpu":
        return MACHINES["cpu"]
    name = torch.cuda.get_device_name()
    known = next((key for key in MACHINES if key in name.lower()), None)
    found = MACHINES[known or "h100"]
    return found if known else msgspec.structs.replace(found, name=name, source="calibrated")


def typical_step(timeline: Timeline) -> int:
    """The number of the step whose time is the median."""
    order = sorted(range(len(timeline.steps)), key=lambda step: timeline.step_seconds[step])
    return order[len(order) // 2]
