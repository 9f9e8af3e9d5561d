"""Job: a lowered program, ready to be looked at, saved and launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piper.api.run import Run
from piper.compiler.driver import Lowered
from piper.errors import PlanError
from piper.ir.graph_text import graph_to_text
from piper.plan.diff import diff
from piper.plan.explain import explain
from piper.plan.summary import summarize
from piper.plan.types import Plan
from piper.runtime.launch.launchers import pool_of
from piper.runtime.launch.pool import Pool
from piper.runtime.launch.pool_run import PoolRun


class Job:
    """A proved plan with its physical graph and the texts of its bodies."""

    def __init__(
        self,
        lowered: Lowered,
        evaluation: Callable[[], Job] | None = None,
    ) -> None:
        self.source = lowered.source
        self.graph = lowered.graph
        self.plan = lowered.plan
        self.bodies = lowered.bodies
        self.report = lowered.report
        self.seconds = lowered.seconds  # what each pass of lowering took
        self._make_evaluation = evaluation
        self._evaluation: Job | None = None

    def evaluation(self) -> Job:
        """The same program under the same strategy, forwards only and with the model in eval() mode.

        It keeps parameters as this job does, so that its workers can share theirs; made once.
        """
        if self._make_evaluation is None:
            raise PlanError("the job is an evaluation itself", legal="evaluation of a training job")
        if self._evaluation is None:
            self._evaluation = self._make_evaluation()
        return self._evaluation

    def summary(self) -> str:
        """Ranks, tasks and peak memory per class."""
        return f"{summarize(self.plan)}\n{self.report.memory()}"

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def explain(self, name: str) -> str:
        """One task of the plan: who made it, what it waits for and why, what it touches."""
        return explain(self.plan, name)

    def diff(self, other: Job) -> str:
        """What differs in the plan of another job; empty if nothing does."""
        return diff(self.plan, other.plan)

    def launch(self, launcher: str | Pool = "local", **options: Any) -> Run:
        """Start the workers: `"local"` processes, `"torchrun"` in a script that torchrun runs,
        `"ray"` on a cluster, `"loopback"` with all ranks in this process, or `"single"` for a plan of
        one rank. A Pool is used and left running.

        `compile=True` sends bodies through Inductor; each is compiled once, and kept on disk.
        `timeout`: seconds without progress after which a step has failed (local, torchrun, ray).
        `ranks_per_gpu`: how many ranks share a card (local). `address` of a cluster to join, `near` and
        `spread`: axes of the mesh whose neighbours should, or should not, share a node, `num_cpus` of
        each rank (ray).
        """
        pool = pool_of(launcher, self.plan, options)
        workers = PoolRun(self.plan, self.bodies, pool, compile=options.get("compile", False))

        def evaluation() -> tuple[Plan, Mapping[str, str]]:
            job = self.evaluation()
            return job.plan, job.bodies

        return Run(self.plan, workers, evaluation)
