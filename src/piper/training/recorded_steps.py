"""RecordedSteps: some steps of a training in, a file with their Timeline out."""

from __future__ import annotations

import os
import re

from piper.api.recording import Recording
from piper.api.run import Run
from piper.errors import RunError
from piper.files import check_path
from piper.observe.timeline_output import check_output, save_timeline
from piper.training.line import Log

DEFAULT = range(3, 6)  # the first steps are slower than others


def checked_steps(
    record: str | os.PathLike[str] | None, record_steps: str | range | None, steps: int | None
) -> range:
    """Which steps, counted from 1, are recorded; "20:23" are 20, 21 and 22."""
    if record is None:
        if record_steps is not None:
            raise RunError(
                f"record_steps={_shown(record_steps)} without record",
                legal='record="FILE.timeline" (--record FILE)',
            )
        return range(0)
    check_path(record, "train")
    check_output(record)
    found = _steps(record_steps)
    if steps is not None and found.stop - 1 > steps:
        raise RunError(
            f"steps {_shown(found)} cannot be recorded: there are {steps}",
            legal=f"record_steps within 1:{steps + 1} (--record-steps)",
        )
    return found


def _steps(given: str | range | None) -> range:
    if given is None:
        return DEFAULT
    found = given
    if isinstance(found, str):
        numbers = re.fullmatch(r"(\d+):(\d+)", found)
        found = range(int(numbers[1]), int(numbers[2])) if numbers else range(0)
    if not found or found.start < 1 or found.step != 1:
        raise RunError(
            f"record_steps={_shown(given)}",
            legal="FIRST:END, counted from 1: 20:23 are the steps 20, 21 and 22",
        )
    return found


def _shown(steps: str | range) -> str:
    return steps if isinstance(steps, str) else f"{steps.start}:{steps.stop}"


class RecordedSteps:
    """Tells runs, which are attempts at one training, when to record, and writes what was measured as
    soon as it is there: once."""

    def __init__(self, path: str | os.PathLike[str] | None, steps: range) -> None:
        self.path = path
        self.steps = steps
        self.recorded = range(0)  # those that are written

    def begin(self, run: Run, lines: Log) -> None:
        """A run may begin within the steps, if it goes on from another."""
        self.run = run
        self.lines = lines
        self.recording: Recording | None = None
        self.first = 0  # that is recorded

    @property
    def waits(self) -> bool:
        """Whether there are steps to record."""
        return self.recorded != self.steps

    def before_step(self, number: int) -> None:
        if number in self.steps and not self.recording and not self.recorded:
            self.recording = self.run.record(steps=self.steps.stop - number)
            self.first = number

    def after_step(self) -> None:
        if self.recording and self.recording.over and not self.recorded:
            self._write(self.recording)

    def end(self) -> None:
        """Write what is there, if training ends earlier; say what is missing."""
        if self.path is None:
            return
        if self.recording and self.recording.done and not self.recorded:
            self.recording.end()
            self._write(self.recording)
        if self.recorded != self.steps:
            found = _shown(self.recorded) if self.recorded else "none"
            missing = f"of the steps {_shown(self.steps)} this run recorded {found}"
            self.lines.warning(self.run.steps, missing)

    def _write(self, recording: Recording) -> None:
        assert self.path is not None
        path, timeline = self.path, recording.timeline
        self.recorded = range(self.first, self.first + recording.done)
        self.run.agreed(lambda: save_timeline(timeline, path))
        spans = f"{len(timeline.steps)} steps, {timeline.num_spans} spans"
        self.lines.note(f"recorded {spans}: {os.fspath(path)}")
