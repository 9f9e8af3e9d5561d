"""Job: a lowered program, ready to be looked at, saved and launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from piper.api.job_file import JobFile, job_from_json, job_to_json
from piper.api.run import Run
from piper.api.shaped_plans import SHAPES, ShapedPlans
from piper.bodies.files.body_fit import check_bodies
from piper.check import Report, check_plan
from piper.compiler.driver import Asking, Lowered
from piper.compiler.source import Source
from piper.cost.machine import Machine
from piper.errors import Call, FileError, NoSuchAttribute, PlanError, naming_line, user_source
from piper.files import PLAN_LIMIT, check_path, check_writable, read_bytes, write_bytes
from piper.frontend.capture.step_results import PredictStep
from piper.ir.form.graph_text import graph_to_text
from piper.ir.form.screen import on_a_screen
from piper.ir.graph import Graph
from piper.ir.tensor_type import Shapes, shapes_text
from piper.plan.report.diff import diff
from piper.plan.report.explain import explain
from piper.plan.report.summary import summarize
from piper.plan.report.track_memory import fill_memories
from piper.plan.types import Plan
from piper.runtime.launch.launchers import pool_of
from piper.runtime.launch.pool import Pool
from piper.runtime.launch.pool_run import PoolRun
from piper.runtime.torch_optimizers import check_param_groups
from piper.sim.simulate import simulate
from piper.stored.folders import found_in
from piper.stored.resumable import check_resumable, options_of
from piper.stored.stored_pieces import StoredState
from piper.view.job_card import job_card
from piper.view.report_data import Shown
from piper.view.show import (
    is_page,
    is_seen,
    machine_for,
    show_html,
    temporary_page,
    write_page,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piper.observe.timeline import Timeline


def load_job(path: str | os.PathLike[str]) -> Job:
    """The job that `Job.save` or `piper plan -o` wrote, proved again.

    It launches, trains and evaluates without the model's code. Operators of the user's own must be
    registered before.
    """
    check_path(path, "load_job")
    data = read_bytes(path, limit=PLAN_LIMIT)
    try:
        return _loaded(job_from_json(data))
    except PlanError as error:
        details, legal = error.details, error.legal
        call = error.call or Call(os.fspath(path))
        raise type(error)(error.message, call=call, details=details, legal=legal) from None


def _loaded(file: JobFile) -> Job:
    plan, other = file.plan, file.evaluation
    report = check_plan(plan)
    check_param_groups(plan.param_groups)
    check_bodies(plan, file.bodies)
    for part in (*plan.classes, *(other.classes if other else ())):
        if "loss" not in part.results:
            raise PlanError(f"the ranks of {part.slice} have no loss as a result")
    stored = None if file.weights is None else StoredState(file.weights)
    if other is None:
        return Job(plan, file.bodies, report, stored=stored)
    if not plan.train or other.train:
        raise PlanError("the job is not one of training and its evaluation")
    for field in (
        "mesh", "batch", "batch_constants", "data_axes", "num_microbatches", "device", "precision"
    ):  # fmt: skip
        if getattr(plan, field) != getattr(other, field):
            raise PlanError(f"the evaluation has another {field} than training")
    evaluation = Job(other, file.bodies, check_plan(other), stored=stored)
    check_bodies(other, file.bodies)
    return Job(plan, file.bodies, report, evaluation=evaluation, stored=stored)


# Whether to train, and on batches of which shapes if not those of the example batch; what is predicted.
Variants = Callable[[bool, Shapes | None, Asking | None], "Job"]


class Job:
    """A proved plan with the texts of its bodies, ready to be looked at, saved and launched.

    Its runs start from what is `stored`, of which `memory` has what lies in this process; and from
    initial values.
    What `lower` made knows its `graph` and `source` too; what was read from a file does not.
    """

    def __init__(
        self,
        plan: Plan,
        bodies: Mapping[str, str],
        report: Report,
        *,
        evaluation: Job | None = None,
        variants: Variants | None = None,
        lowered: Lowered | None = None,
        stored: StoredState | None = None,
        memory: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self.stored = stored
        self.memory = memory
        self.bodies = bodies
        self.report = report
        self._evaluation = evaluation
        self._variants = variants
        self._shaped: dict[tuple[bool, Shapes], Job] = {}
        self._lowered = lowered

    @classmethod
    def of(
        cls,
        lowered: Lowered,
        variants: Variants | None = None,
        *,
        stored: StoredState | None = None,
        memory: Mapping[str, Tensor] | None = None,
    ) -> Job:
        """The job of a program that was lowered."""
        plan, bodies, report = lowered.plan, lowered.bodies, lowered.report
        return cls(
            plan, bodies, report, variants=variants, lowered=lowered, stored=stored, memory=memory
        )

    @property
    def graph(self) -> Graph:
        """The physical graph that the plan was made of."""
        return self._from_lowering.graph

    @property
    def source(self) -> Source:
        """The model, batch and step that were traced."""
        return self._from_lowering.source

    @property
    def model(self) -> nn.Module | None:
        """The model that was traced, without any element; None where the job was read from a file."""
        return self._lowered.source.model if self._lowered else None

    @property
    def optimizer(self) -> Any:
        """What `lower` was given as an optimizer."""
        return self._from_lowering.optimizer

    @property
    def seconds(self) -> Mapping[str, float]:
        """What each pass of lowering took."""
        return self._from_lowering.seconds

    @property
    def _from_lowering(self) -> Lowered:
        if self._lowered is None:
            raise PlanError(
                "this job was read from a file, without its program",
                legal="program.lower(...), where the model's code is at hand",
            )
        return self._lowered

    def save(self, path: str | os.PathLike[str], *, evaluation: bool = True) -> None:
        """Write the plan, its bodies and those of its evaluation as JSON, for `load_job`.

        `evaluation=False` leaves the evaluation out, for a model that has none. Of weights in files it
        has their places.
        """
        check_path(path, "job.save")
        if self.memory:
            raise PlanError(
                "the job starts from a state_dict in memory, which its file cannot name",
                legal="lower(weights=PATH) of what torch.save or save_file wrote",
            )
        other = self.evaluation() if evaluation and self.plan.train else None
        bodies = {**self.bodies, **(other.bodies if other else {})}
        weights = self.stored.model if self.stored else None
        write_bytes(path, job_to_json(self.plan, bodies, other.plan if other else None, weights))

    def evaluation(self) -> Job:
        """The same program under the same strategy, forwards only and with the model in eval() mode.

        It keeps parameters as this job does, so that its workers can share theirs; made once.
        """
        if self._evaluation is None and self._variants is None:
            if self.plan.train:
                raise PlanError("the job was saved without its evaluation", legal="job.save(path)")
            raise PlanError("the job is an evaluation itself", legal="evaluation of a training job")
        if self._evaluation is None:
            assert self._variants is not None
            self._evaluation = self._variants(False, None, None)
        return self._evaluation

    def shaped(self, shapes: Shapes, *, training: bool = True) -> Job:
        """This job, or its evaluation, for batches whose leaves have these shapes; made once.

        It keeps parameters, gradients and optimizer state as this job does, so that its workers can
        share theirs.
        """
        if shapes == self.plan.batch_shapes:
            return self if training else self.evaluation()
        if self._variants is None:
            raise PlanError(
                "this job was read from a file: it has no program to compile for batches of another "
                "shape",
                legal=f"batches of {shapes_text(self.plan.batch_shapes)}, or program.lower(...)",
            )
        if (training, shapes) not in self._shaped:
            self._shaped[training, shapes] = self._variants(training, shapes, None)
        return self._shaped[training, shapes]

    def prediction(self, predict: Callable[[Any, Any], Any], batch: Any) -> Job:
        """The same model under the same strategy, forwards only and in eval() mode, for what a function
        `predict(model, batch)` makes of batches like `batch`, which may have other tensors than those of
        training. It keeps parameters as this job does."""
        if self._variants is None:
            raise PlanError(
                "this job was read from a file: it has no program to compile a prediction of",
                legal="program.lower(...), where the model's code is at hand",
            )
        return self._variants(False, None, Asking(PredictStep(predict), batch))

    def summary(self) -> str:
        """Ranks, tasks and peak memory per class."""
        return f"{summarize(self.plan)}\n{self.report.memory()}"

    if not TYPE_CHECKING:  # a checker shall know of no other names

        def __getattr__(self, name: str) -> Any:
            """What a run does, a job does not yet."""
            text, legal = f"a job has no {name!r}", ""
            if name == "train":
                legal = "piper.train(job, data, steps=...)"
            elif not name.startswith("_") and hasattr(Run, name):
                legal = f"with job.launch() as run: run.{name}(...)"
            if not legal:
                raise AttributeError(text)
            raise NoSuchAttribute(text, call=Call(f"job.{name}", user_source()), legal=legal)

    def __repr__(self) -> str:
        """The summary, as far as it fits a screen."""
        return on_a_screen(["Job", *self.summary().splitlines()], more="job.summary()")

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def explain(self, name: str) -> str:
        """One task of the plan: who made it, what it waits for and why, what it touches."""
        return explain(self.plan, name)

    def simulate(
        self, machine: str | Machine | None = None, *, steps: int = 2, by_rank: bool = False
    ) -> Timeline:
        """What steps would look like on a machine, before any of them runs.

        `machine` is that of `show`. There is a track for each class of ranks, or for each rank.
        """
        if steps < 1:
            raise PlanError(f"steps={steps}", legal="at least 1")
        found = simulate(self.plan, machine_for(self.plan, machine), steps=steps, by_rank=by_rank)
        fill_memories(self.plan, found)
        return found

    def show(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeline: Timeline | None = None,
        machine: str | Machine | None = None,
        title: str = "",
        open: bool = False,
    ) -> None:
        """Write a report that a browser opens: timeline, memory, communication, graph and directives.

        The step is simulated on `machine`, `"cpu"` or `"h100"` by default, after the plan's device. A
        `timeline` of this job that was recorded stands below it. Without a path the file is in a
        temporary folder, which is said, and opened where somebody sits before a display.
        """
        if path is None:
            path, open = temporary_page(), open or is_seen()
            print(f"the report is {path}")
        check_path(path, "job.show")
        if not is_page(path):
            raise FileError(f"{os.fspath(path)} is no page", legal="a file called .html")
        check_writable(path)
        shown = [] if timeline is None else [Shown("the recorded step", timeline)]
        html = show_html(self.plan, shown, machine=machine_for(self.plan, machine), title=title)
        write_page(html, path, opened=open)

    def _repr_html_(self) -> str:
        """For notebooks: the strategy, its figures, and a picture of the simulated step."""
        return job_card(self.plan, machine_for(self.plan, None))

    def diff(self, other: Job) -> str:
        """What differs in the plan of another job; empty if nothing does."""
        return diff(self.plan, other.plan)

    def launch(self, launcher: str | Pool = "local", **options: Any) -> Run:
        """Start the workers: `"local"` processes, `"torchrun"` in a script that torchrun runs,
        `"ray"` on a cluster, `"loopback"` with all ranks in this process, or `"single"` for a plan of
        one rank. A Pool is used and left running.

        `compile=True` sends bodies through Inductor; each is compiled once, and kept on disk.
        `timeout`: seconds without progress after which a step has failed (local, torchrun, ray).
        `shapes`: of how many shapes batches may be; there is a plan for each.
        `ranks_per_gpu`: how many ranks share a card (local). `address` of a cluster to join, `near` and
        `spread`: axes of the mesh whose neighbours should, or should not, share a node, `num_cpus` of
        each rank (ray).
        """
        return self._started(launcher, options, self.stored, self.memory)

    def resume(
        self, folder: str | os.PathLike[str], launcher: str | Pool = "local", **options: Any
    ) -> Run:
        """Launch, as `launch` does, and go on from what `run.save(folder)` wrote, under any strategy; or
        from the latest of the checkpoints in a folder."""
        check_path(folder, "job.resume")
        path, manifest = found_in(folder)
        check_resumable(manifest, self.plan, path)
        run = self._started(launcher, options, manifest.state(path))
        run.resumed, run.resumed_from = manifest, path
        before = options_of(manifest, self.plan)
        if any(before):
            run.set_options(before)
        return run

    def rehearse(
        self,
        batch: Any,
        launcher: str | Pool = "local",
        *,
        steps: int = 5,
        compile: bool = False,
    ) -> Timeline:
        """The times of all tasks without communication: ranks run them side by side, and nobody waits.
        What the simulator knows of bodies comes from here; nothing is trained."""
        pool = pool_of(launcher, self.plan, {})
        workers = PoolRun(self.plan, self.bodies, pool, compile=compile, rehearses=True)
        with Run(self.plan, workers, ShapedPlans(self, 1)) as run:
            run.step(batch)
            recording = run.record(steps)
            for _ in range(steps):
                run.step(batch)
        return recording.timeline

    def _started(
        self,
        launcher: str | Pool,
        options: dict[str, Any],
        stored: StoredState | None,
        memory: Mapping[str, Tensor] | None = None,
    ) -> Run:
        limit = options.pop("shapes", SHAPES)
        if not isinstance(limit, int) or limit < 1:
            raise PlanError(
                f"shapes={limit!r}", legal="how many shapes batches may have, at least 1"
            )
        with naming_line("launch"):
            pool = pool_of(launcher, self.plan, options)
            compile = options.get("compile", False)
            workers = PoolRun(
                self.plan, self.bodies, pool, stored=stored, memory=memory, compile=compile
            )
        return Run(self.plan, workers, ShapedPlans(self, limit))
