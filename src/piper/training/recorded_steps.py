"""RecordedSteps: some steps of a training in, a file with their Timeline out."""

from __future__ import annotations

import os
import re
from pathlib import Path

from piper.api.recording import Recording
from piper.api.run import Run
from piper.errors import RunError
from piper.observe.timeline_files import save_timeline
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
    if not Path(record).parent.is_dir():
        raise RunError(f"record={os.fspath(record)!r}: there is no such folder", legal="a folder")
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
    """Tells a run when to record, and writes what was measured as soon as it is there."""

    def __init__(
        self, run: Run, lines: Log, path: str | os.PathLike[str] | None, steps: range
    ) -> None:
        self.run = run
        self.lines = lines
        self.path = path
        self.steps = steps
        self.recording: Recording | None = None
        self.written = False

    def before_step(self, number: int) -> None:
        if number == self.steps.start:
            self.recording = self.run.record(steps=len(self.steps))

    def after_step(self) -> None:
        if self.recording and self.recording.over and not self.written:
            self._write(self.recording)

    def end(self) -> None:
        """Write what is there, if training ends earlier; say what is missing."""
        if self.path is None or self.written:
            return
        done = self.recording.done if self.recording else 0
        if self.recording and done:
            self.recording.end()
            self._write(self.recording)
        missing = f"{done} of the steps {_shown(self.steps)}, which were to be recorded, were run"
        self.lines.warning(self.run.steps, missing)

    def _write(self, recording: Recording) -> None:
        self.written = True
        assert self.path is not None
        path, timeline = self.path, recording.timeline

        def write() -> None:
            try:
                save_timeline(timeline, os.fspath(path))
            except OSError as error:
                raise RunError(
                    f"record={os.fspath(path)!r} cannot be written: {error.strerror}",
                    legal="another file",
                ) from None

        self.run.agreed(write)
        spans = f"{len(timeline.steps)} steps, {timeline.num_spans} spans"
        self.lines.note(f"recorded {spans}: {os.fspath(path)}")
