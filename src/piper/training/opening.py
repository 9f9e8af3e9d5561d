"""Opening: a job and a launcher in; the run that a training loop uses, and its log, out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any

from piper.api.job import Job
from piper.api.program import Program
from piper.api.run import Run
from piper.errors import RunError, did_you_mean
from piper.ir.history import ranks_text
from piper.plan.types import Plan
from piper.runtime.launch.launchers import LAUNCHERS
from piper.runtime.launch.pool import Pool
from piper.runtime.launch.reading import reference
from piper.runtime.launch.torchrun_environment import under_torchrun
from piper.training.checkpointing import newest
from piper.training.data import check_again
from piper.training.elastic import Elastic
from piper.training.line import Log
from piper.training.meter import unit_of
from piper.training.watch import Watch

OF_EVERY_LAUNCH = ("compile", "shapes")
_REPORTING = ("local", "ray")  # launchers that tell what becomes of each rank


def launcher_of(plan: Plan, launch: str | Pool) -> str | Pool:
    """What "auto" means here."""
    if launch != "auto":
        return launch
    if under_torchrun():
        return "torchrun"
    return "single" if plan.mesh.size == 1 else "local"


def check_job(job: Any) -> None:
    """Raise unless it is something that can be trained."""
    if isinstance(job, Job | Run | Elastic):
        return
    legal = "a job: piper.trace(Model, batch, step).apply(strategy).lower(optimizer=...)"
    if isinstance(job, Program):
        legal = "a job: program.lower(optimizer=...)"
    raise RunError(f"train was given a {type(job).__name__}", legal=legal)


def check_options(options: Iterable[str], own: Iterable[str]) -> None:
    """Raise for an option that neither train nor any launcher has."""
    own = [name for name in own if name != "launch_options"]
    more = {name for kind in LAUNCHERS.values() for name in kind.options}
    known = [*own, *more, *OF_EVERY_LAUNCH]
    for option in options:
        if option not in known:
            raise RunError(
                f"train takes no {option}{did_you_mean(option, known)}",
                legal=f"{', '.join(own)}; and options of job.launch",
            )


def check_importable(job: Job | Run | Elastic, launch: str | Pool, data: Any) -> None:
    """Raise before ranks are launched whose processes could not import the data function."""
    if callable(data) and isinstance(job, Job) and launcher_of(job.plan, launch) in _REPORTING:
        reference(data)


def speaks(job: Job | Run | Elastic, launch: str | Pool) -> bool:
    """Whether this process says what happens: of several ranks of torchrun the first does."""
    return not _is_rank(job, launch) or os.environ.get("RANK") == "0"


def _is_rank(job: Job | Run | Elastic, launch: str | Pool) -> bool:
    """Whether this process is one of torchrun's ranks."""
    if isinstance(job, Run):
        return job.workers.reading == "rank"
    return launch == "torchrun" or (launch == "auto" and under_torchrun())


@contextlib.contextmanager
def opened(
    job: Job | Run,
    launch: str | Pool,
    log: str | IO[str],
    options: dict[str, Any],
    checkpoint: str | os.PathLike[str] | None,
    watch: Watch,
) -> Iterator[tuple[Run, Log]]:
    """A run and its log; a run that was made here ends here. Of a folder of checkpoints it goes on from
    the latest one, if there is any. `watch` hears the log."""
    unit, _ = unit_of(job.plan)
    lines = Log(log if speaks(job, launch) else "none", unit=unit)
    watch.listen(lines)
    if isinstance(job, Run):
        if launch != "auto" or options or checkpoint is not None:
            raise RunError("the run is launched already", legal="piper.train(run, data, steps=...)")
        yield job, lines
        return
    launcher = launcher_of(job.plan, launch)
    if launcher in _REPORTING:
        options = {"report": lines.launch, **options}
    saved = None if checkpoint is None else newest(checkpoint, lines)
    with (
        job.resume(saved, launcher, **options) if saved else job.launch(launcher, **options) as run
    ):
        where = ranks_text(job.plan.history, job.plan.mesh)
        lines.note(f"{where}, precision {job.plan.precision}, plan {job.plan.content_hash()}")
        yield run, lines


def check_ahead(ahead: bool, job: Job | Run | Elastic, launch: str | Pool) -> None:
    if not isinstance(ahead, bool):
        raise RunError(f"ahead={ahead!r}", legal="True or False")
    if ahead and _is_rank(job, launch):
        raise RunError(
            "ahead=True under torchrun, whose ranks would have to agree what is due",
            legal='launch="local" or "ray"; or run.begin(batch) in a loop of your own',
        )


def check_steps(steps: int | None, evaluate: Any, evaluate_every: int) -> None:
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise RunError(f"steps={steps!r}", legal="at least 1, or None: until the data ends")
    if evaluate is None and evaluate_every:
        raise RunError(
            f"evaluate_every={evaluate_every}, but evaluate is missing", legal="evaluate=DATA"
        )
    if evaluate_every < 0:
        raise RunError(f"evaluate_every={evaluate_every}", legal="steps between evaluations, or 0")
    if evaluate is not None:
        check_again(evaluate)
