"""Job: a lowered program, ready to be looked at, saved and launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from piper.api.run import Run
from piper.api.source import Source
from piper.check import Report
from piper.errors import RunError, did_you_mean
from piper.ir.graph import Graph
from piper.ir.text import graph_to_text
from piper.plan.diff import diff
from piper.plan.explain import explain
from piper.plan.summary import summarize
from piper.plan.types import Plan
from piper.runtime.local import LocalPool
from piper.runtime.loopback import Loopback
from piper.runtime.pool_run import Pool, PoolRun
from piper.runtime.ray_pool import RayPool
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
    ) -> None:
        self.source = source
        self.graph = graph
        self.plan = plan
        self.bodies = bodies
        self.report = report

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
        `"ray"` on a cluster, `"loopback"` with all ranks in this process, or `"single"` for a plan
        of one rank.

        Options of local: `timeout` (seconds without progress after which a step has failed),
        `ranks_per_gpu`; of torchrun: `timeout`; of ray: `timeout`, `address` of a cluster to join,
        `near` and `spread`: axes of the mesh whose neighbours should, or should not, share a node,
        `num_cpus` of each rank. A Pool is used and left running.
        """
        if not isinstance(launcher, str):
            self._check_options(options, ())
            return Run(self.plan, PoolRun(self.plan, self.bodies, launcher))
        if launcher == "loopback":
            self._check_options(options, ("adversary", "seed", "observe"))
            if self.plan.device != "cpu":
                raise RunError("loopback runs on the CPU", legal='lower(device="cpu")')
            return Run(self.plan, Loopback(self.plan, self.bodies, **options))
        if launcher == "single":
            self._check_options(options, ())
            return Run(self.plan, SingleRun(self.plan, self.bodies))
        if launcher == "torchrun":
            self._check_options(options, ("timeout",))
            return Run(self.plan, TorchrunRun(self.plan, self.bodies, **options))
        if launcher == "local":
            self._check_options(options, ("timeout", "ranks_per_gpu", "report"))
            make = partial(LocalPool, self.plan.mesh.size, device=self.plan.device, **options)
            return Run(self.plan, PoolRun(self.plan, self.bodies, make))
        if launcher == "ray":
            known = ("timeout", "report", "address", "near", "spread", "num_cpus")
            self._check_options(options, known)
            mesh, device = self.plan.mesh, self.plan.device
            pool = partial(RayPool, mesh.size, device=device, mesh=mesh, **options)
            return Run(self.plan, PoolRun(self.plan, self.bodies, pool))
        raise RunError(
            f"no launcher is called {launcher!r}", legal="local, torchrun, ray, loopback or single"
        )

    @staticmethod
    def _check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
        for name in options:
            if name not in known:
                raise RunError(
                    f"launch takes no {name} here{did_you_mean(name, known)}",
                    legal=", ".join(known) or "no options",
                )
