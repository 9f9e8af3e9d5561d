"""Recording: the coming steps of a run in, the Timeline that was measured out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from piper.errors import RunError
from piper.observe.timeline import Timeline
from piper.plan.types import Plan
from piper.runtime.launch.pool_run import PoolRun
from piper.runtime.record.measured import measured_timeline


class Recording:
    """Of `steps` steps, or, as a context manager, of those in its block; one that fails ends it.

    It is of one plan: of steps on batches of several shapes, those like the first are in it.
    """

    def __init__(self, workers: PoolRun, steps: int | None) -> None:
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise RunError(f"record(steps={steps!r})", legal="at least 1")
        self.steps = steps
        self.done = 0
        self.over = False
        self._workers = workers
        self._plan: Plan | None = None  # of the first step
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What was measured, after the last step."""
        if self._timeline is not None:
            return self._timeline
        if self.over:
            raise RunError("no step was recorded to its end", legal="a step after run.record()")
        wanted = "its block" if self.steps is None else f"{self.steps} steps"
        raise RunError(
            f"{self.done} steps are recorded so far", legal=f"the timeline after {wanted}, or end()"
        )

    def __repr__(self) -> str:
        if self._timeline is not None:
            return f"<Recording, over: {self._timeline.num_spans:,} spans of {self.done} steps>"
        wanted = "" if self.steps is None else f" of {self.steps}"
        state = "over" if self.over else "going on"
        return f"<Recording: {self.done}{wanted} steps, {state}>"

    @contextmanager
    def step(self, role: str) -> Iterator[None]:
        """Around a step of the plan with this role."""
        try:
            if self._plan is None:
                self._plan = self._workers.plans[role]
                self._workers.record(role, self.steps)
            yield
        except BaseException:
            self._drop()
            raise
        self.done += 1
        if self.done == self.steps:
            self.end()

    def end(self) -> None:
        """Record no more steps."""
        if self.over:
            return
        try:
            if self._plan is not None:
                self._timeline = measured_timeline(self._plan, self._workers.recorded())
        except BaseException:
            self._drop()
            raise
        self.over = True

    def _drop(self) -> None:
        """Forget what was measured; ranks that are still there go on without."""
        if not self.over:
            self.over = True
            if self._plan is not None and not self._workers.failed:
                with suppress(RunError):  # whoever interrupts a step ends the ranks
                    self._workers.drop_recording()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.end()
        else:
            self._drop()
