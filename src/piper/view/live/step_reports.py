"""StepReports: recorded steps in; the block of the latest one's report out, made by a process of its own
when a browser asks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

from piper.observe.timeline import Timeline
from piper.observe.timeline_files import to_bytes

PROGRAM = "piper.view.live.make_block"


@dataclass(frozen=True)
class RecordedStep:
    number: int  # of those that were recorded, from 1
    name: str
    timeline: Timeline


class StepReports:
    """A report of a large plan takes seconds of Python. Another process makes it, so that training keeps
    its interpreter to itself. Nobody makes it unless a browser asks."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self._latest: RecordedStep | None = None
        self._known: tuple[int, bytes | None] = (0, None)  # the number and block made last
        self._making = threading.Lock()  # one at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._closed = False

    def put(self, timeline: Timeline, name: str) -> int:
        """The step's number. Those before it are no longer kept."""
        number = 1 + (self._latest.number if self._latest else 0)
        self._latest = RecordedStep(number, name, timeline)
        return number

    def latest(self) -> tuple[int, bytes] | None:
        """The number and the block of the step that was recorded last; None without one."""
        with self._making:
            found = self._latest
            if found is not None and self._known[0] != found.number:
                self._known = found.number, self._made(found)
            number, block = self._known
            return None if block is None else (number, block)

    def _made(self, step: RecordedStep) -> bytes | None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._starting:
            if self._closed:
                return None
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, step.name, self.title],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is the training's
            )
        with process:
            out, _ = process.communicate(to_bytes(step.timeline))
        return out if process.returncode == 0 else None

    def close(self) -> None:
        """End the process, if there is one."""
        with self._starting:
            self._closed = True
            if self._process is not None:
                self._process.kill()
