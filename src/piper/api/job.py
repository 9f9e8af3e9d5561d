"""Job: a lowered program, ready to be looked at, saved and launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.api.run import Run
from piper.api.source import Source
from piper.check import Report
from piper.errors import RunError
from piper.ir.graph import Graph
from piper.ir.text import graph_to_text
from piper.plan.diff import diff
from piper.plan.explain import explain
from piper.plan.summary import summarize
from piper.plan.types import Plan
from piper.runtime.local import LocalPool, LocalRun
from piper.runtime.loopback import Loopback
from piper.runtime.single import SingleRun

_OPTIONS = {"loopback": ("adversary", "seed", "observe", "compile"), "single": ("compile",)}


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

    def launch(self, launcher: str | LocalPool = "local", **options: Any) -> Run:
        """Start the workers: `"local"` processes, `"loopback"` in this process, or `"single"` for a
        plan of one rank on its device. A LocalPool is used and left running.

        `compile=True` sends the bodies through Inductor; each is compiled once, and kept on disk."""
        if launcher != "single" and self.plan.device != "cpu":
            raise RunError(
                f"the plan is for {self.plan.device}, where only one rank can run so far",
                legal='launch("single"), or lower(device="cpu")',
            )
        unknown = set(options) - set(_OPTIONS.get(str(launcher), ()))
        if unknown:
            legal = [f'{o} with "{name}"' for name, known in _OPTIONS.items() for o in known]
            raise RunError(
                f"launch takes no {', '.join(sorted(unknown))} here", legal=", ".join(legal)
            )
        if isinstance(launcher, LocalPool):
            return Run(self.plan, LocalRun(self.plan, self.bodies, pool=launcher))
        if launcher == "loopback":
            return Run(self.plan, Loopback(self.plan, self.bodies, **options))
        if launcher == "single":
            return Run(self.plan, SingleRun(self.plan, self.bodies, **options))
        if launcher == "local":
            return Run(self.plan, LocalRun(self.plan, self.bodies))
        raise RunError(f"no launcher is called {launcher!r}", legal="local, loopback or single")
