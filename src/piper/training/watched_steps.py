"""WatchedSteps: a training in; the Timeline of one of its steps now and then out, at a bounded cost."""

from __future__ import annotations

import math
import time
from collections import deque

from piper.api.recording import Recording
from piper.api.run import Run
from piper.errors import RunError
from piper.observe.timeline import Timeline

FIRST = 3  # the steps before it are slower than others
SHARE = 0.01  # of the training's time that recording may take
SECONDS = 5.0  # between two recorded steps, at least: nobody looks sooner
KEPT = 32  # steps whose times say how long one takes


class WatchedSteps:
    """Records one step in `every`; without that, as many as cost the training a hundredth of its time.
    Under torchrun all ranks record the same ones: rank 0 says which."""

    def __init__(self, every: int | None) -> None:
        self.every = every

    def begin(self, run: Run, step: int, steps: int | None) -> None:
        """A run that goes on after a step."""
        self.run = run
        self.due = step + min(FIRST, self.every or FIRST)
        if steps is not None:
            self.due = min(self.due, max(steps, step + 1))
        self._recording: Recording | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT)  # of the last steps that were not recorded

    def before_step(self, number: int) -> None:
        self._begun = time.perf_counter()
        self._recording = None
        if self.every != 0 and number >= self.due and not self.run.is_recording:
            self._recording = self.run.record(steps=1)

    def after_step(self, number: int) -> Timeline | None:
        """What was measured, if it was."""
        seconds = time.perf_counter() - self._begun
        if self._recording is None:
            self._seconds.append(seconds)
            return None
        self.due = number + self.run.agreed(lambda: self._pause(seconds))
        try:
            return self._recording.timeline
        except RunError:  # the step did not come to its end
            return None

    def _pause(self, seconds: float) -> int:
        """Steps until the next one that is recorded."""
        if self.every is not None:
            return self.every
        usual = max(min(self._seconds, default=seconds), 1e-6)
        cost = max(0.0, seconds - usual)
        return max(1, math.ceil(max(cost / SHARE, SECONDS) / usual))
