"""Job: a lowered program, ready to be looked at, saved and launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from piper.api.run import Run, Workers
from piper.api.source import Source
from piper.check import Report
from piper.errors import PlanError, RunError, did_you_mean
from piper.ir.graph import Graph
from piper.ir.text import graph_to_text
from piper.plan.diff import diff
from piper.plan.explain import explain
from piper.plan.summary import summarize
from piper.plan.types import Plan
from piper.runtime.local import LocalPool
from piper.runtime.loopback import Loopback
from piper.runtime.pool_run import Pool, PoolRun
from piper.runtime.single import SingleRun
from piper.runtime.torchrun import TorchrunRun


class Job:
    """A proved plan with its physical graph and the texts of its bodies."""

    def __init__(
        self,
        source: Source,
        graph: Graph,
        plan: Plan,
        bodies: Mapping[str, str],
        report: Report,
        evaluation: Callable[[], Job] | None = None,
    ) -> None:
        self.source = source
        self.graph = graph
        self.plan = plan
        self.bodies = bodies
        self.report = report
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
        `"loopback"` with all ranks in this process, or `"single"` for a plan of one rank.

        Options of local: `timeout` (seconds without progress after which a step has failed),
        `ranks_per_gpu`; of torchrun: `timeout`. A Pool is used and left running.
        """
        if not isinstance(launcher, str):
            self._check_options(options, ())
            return self._run(PoolRun(self.plan, self.bodies, launcher))
        if launcher == "loopback":
            self._check_options(options, ("adversary", "seed", "observe"))
            if self.plan.device != "cpu":
                raise RunError("loopback runs on the CPU", legal='lower(device="cpu")')
            return self._run(Loopback(self.plan, self.bodies, **options))
        if launcher == "single":
            self._check_options(options, ())
            return self._run(SingleRun(self.plan, self.bodies))
        if launcher == "torchrun":
            self._check_options(options, ("timeout",))
            return self._run(TorchrunRun(self.plan, self.bodies, **options))
        if launcher == "local":
            self._check_options(options, ("timeout", "ranks_per_gpu", "report"))
            make = partial(LocalPool, self.plan.mesh.size, device=self.plan.device, **options)
            return self._run(PoolRun(self.plan, self.bodies, make))
        raise RunError(
            f"no launcher is called {launcher!r}", legal="local, torchrun, loopback or single"
        )

    @staticmethod
    def _check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in options:
            if name not in known:
                raise RunError(
                    f"launch takes no {name} here{did_you_mean(name, known)}",
                    legal=", ".join(known) or "no options",
                )

    def _run(self, workers: Workers) -> Run:
        def evaluation() -> tuple[Plan, Mapping[str, str]]:
            job = self.evaluation()
            return job.plan, job.bodies

        return Run(self.plan, workers, evaluation)
