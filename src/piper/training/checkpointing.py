"""Checkpoints: when a training loop saves, where, and from which one it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from piper.api.run import Run
from piper.api.saving import Saving
from piper.errors import FileError, PiperError, RankLost, RunError
from piper.files import check_path
from piper.stored.folders import checkpoints, prune, step_folder, sweep
from piper.stored.manifest import read_manifest
from piper.training.callbacks import Callbacks
from piper.training.elastic import Attempt
from piper.training.line import Log
from piper.training.position import Position
from piper.training.progress import Progress

KEPT_RECORDS = 10_000  # the last ones: a checkpoint should not grow with every step


class Checkpoints:
    """Saves a run every so many steps, beside the coming ones, and keeps the latest few."""

    def __init__(
        self,
        run: Run,
        lines: Log,
        folder: str | os.PathLike[str],
        *,
        every: int,
        keep: int | None,
        progress: Callable[..., Progress],
        told: Callbacks,
    ) -> None:
        self.run = run
        self.lines = lines
        self.folder = folder
        self.every = every
        self.keep = keep
        self.progress = progress
        self.told = told
        self.saving: Saving | None = None
        self.last = run.steps if run.resumed else -1  # the step that was saved last
        self.begun = self.last  # the step whose save began last: one that fails is not tried again
        self.ending = False
        self.cannot_prune = ""
        left = run.agreed(lambda: sweep(folder))
        if left:
            lines.note(f"{os.fspath(folder)}: removed what was not finished: {', '.join(left)}")

    @property
    def waits(self) -> bool:
        """Whether there is something to do after the coming step."""
        return bool(self.saving or (self.every and (self.run.steps + 1) % self.every == 0))

    def after_step(self) -> bool:
        """Look after the one on its way, and begin the next if it is time; whether it was."""
        if self.saving:
            self._look(wait=False)
        due = bool(self.every) and self.run.steps % self.every == 0
        if due:
            self.begin()
        return due

    def rescue(self, survivors: Sequence[int]) -> None:
        """After a loss: save what is left of the run, if that is all of it."""
        self.abandon()  # its ranks are gone
        if self.last == self.run.steps:
            return
        target = step_folder(self.folder, self.run.steps)
        try:
            found = self.run.rescue(target, survivors, facts_of(self.progress(states=False)))
        except PiperError as error:
            self.lines.warning(self.run.steps, f"nothing could be saved: {error.message}")
            return
        if found is None:
            text = (
                "the ranks that are left do not hold all of the last step: an earlier one is taken"
            )
        else:
            text = f"saved step {self.run.steps} from the ranks that are left"
        self.lines.note(text)

    def begin(self) -> None:
        """One at a time: a disk that is slower than training makes it wait."""
        if self.saving:
            self._look(wait=True)
        if self.begun == self.run.steps:
            return
        self.begun = self.run.steps
        self.lines.state("saving")
        try:
            target = step_folder(self.folder, self.run.steps)
            self.saving = self.run.save(target, wait=False, training=facts_of(self.progress()))
        except FileError as error:
            self._failed(error)

    def end(self) -> None:
        """Save the last step, and wait for it."""
        self.ending = True
        self.save()

    def save(self) -> None:
        """Save this step, and wait for it."""
        self.begin()
        if self.saving:
            self._look(wait=True)

    def leave(self) -> None:
        """Training has failed, or was interrupted: what is on its way is finished if it can be."""
        if self.saving and not self.run.workers.failed and self.run.workers.reading != "rank":
            with contextlib.suppress(PiperError):
                self._look(wait=True)
        self.abandon()

    def abandon(self) -> None:
        """Remove what is on its way, and will not be whole."""
        if self.saving:
            self.saving.abandon()
        self.saving = None

    @property
    def is_saved(self) -> bool:
        """Whether the last step is."""
        return self.last == self.run.steps

    def _look(self, *, wait: bool) -> None:
        assert self.saving is not None
        saving = self.saving
        try:
            if wait:
                saving.wait()
            if not saving.done():
                return
        except FileError as error:
            self._failed(error)
            return
        self.saving, self.last = None, saving.steps
        self._prune()
        facts = {
            "step": saving.steps,
            "folder": os.fspath(saving.folder),
            "bytes": saving.num_bytes,
            "seconds": saving.seconds,
        }
        self.lines.checkpoint(facts)
        self.told.tell("on_checkpoint", facts)

    def _prune(self) -> None:
        """Leave the latest ones, and the one that tensors which no rank holds are read from. What
        cannot be removed is said once."""
        if not self.keep:
            return
        source = self.run.resumed_from if self.run.has_unheld else None
        try:
            self.run.agreed(lambda: prune(self.folder, self.keep or 0, source))
        except FileError as error:
            if error.message != self.cannot_prune:
                self.cannot_prune = error.message
                self.lines.warning(self.run.steps, f"{error.message}; training goes on")

    def _failed(self, error: FileError) -> None:
        """What was saved before is still there, and training goes on, unless this was its end."""
        step = self.saving.steps if self.saving else self.run.steps
        self.saving = None
        rest = "training goes on"
        if self.ending:
            rest = f"the last one is of step {self.last}" if self.last >= 0 else "there is none"
        self.lines.warning(step, f"no checkpoint: {error.message}; {rest}")


@contextlib.contextmanager
def surviving(saver: Checkpoints, attempt: Attempt | None) -> Iterator[None]:
    """Inside, a loss of ranks ends the attempt, after what is left was saved. What is on its way when
    training fails is finished, or removed."""
    if attempt is not None:
        saver.run.workers.spare_survivors()
        if not saver.run.resumed:
            saver.begin()  # so that there is one to go on from
    try:
        yield
    except RankLost as error:
        if attempt is None:
            saver.leave()
            raise
        saver.lines.warning(saver.run.steps + 1, error.message)
        attempt.lost_at = time.perf_counter()
        saver.rescue(error.survivors)
        raise
    except BaseException:
        saver.leave()
        raise


def facts_of(progress: Progress) -> dict[str, Any]:
    """For a manifest."""
    kept = msgspec.structs.replace(progress, records=progress.records[-KEPT_RECORDS:])
    facts: dict[str, Any] = msgspec.json.decode(kept.to_json())
    return facts


def progress_of(run: Run) -> Progress:
    """Where the loop was that saved what a run goes on from, unless it has gone on already. What was
    saved outside of a loop knows its steps, and of no data. A loop counts the steps of one that it
    went on from, a run those of all its loops: the larger number has all."""
    if run.resumed is None or run.steps != run.resumed.steps:
        return Progress()
    if not run.resumed.training:
        return Progress(position=Position(steps=run.steps))
    found = Progress.from_json(msgspec.json.encode(run.resumed.training))
    steps = max(found.position.steps, run.steps)
    position = msgspec.structs.replace(found.position, steps=steps)
    return msgspec.structs.replace(found, position=position)


def newest(folder: str | os.PathLike[str], lines: Log) -> str | None:
    """The latest checkpoint whose manifest can be read."""
    found = checkpoints(folder)
    if not found:
        lines.note(f"{os.fspath(folder)} has no checkpoint yet")
    for path in reversed(found):
        try:
            read_manifest(path)
        except FileError as error:
            lines.note(f"{error.message}: an older checkpoint is taken")
            continue
        lines.note(f"resumed from {path}")
        return os.fspath(path)
    return None


def check_settings(folder: Any, every: int | None, keep: int | None, resume: bool) -> None:
    """Raise unless these go together."""
    if folder is None and (every or keep or resume):
        raise RunError(
            "checkpoints, but no folder for them", legal='checkpoint="DIR" (--checkpoint DIR)'
        )
    if folder is not None:
        check_path(folder, "train")
    if folder is not None and not resume and checkpoints(folder):
        raise RunError(
            f"{os.fspath(folder)} has checkpoints of another training",
            legal="resume=True (--resume) to go on with it, or another folder",
        )
    for name, number in (("checkpoint_every", every), ("keep", keep)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise RunError(f"{name}={number!r}", legal="at least 1, or None")


@contextlib.contextmanager
def heeding_termination(run: Run) -> Iterator[Callable[[], bool]]:
    """Inside, a request to end does not end the process; what is given says whether there was one, to
    all ranks alike."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())

    def anywhere() -> bool:
        if run.workers.reading != "rank":
            return asked.is_set()
        pool: Any = run.workers.pool
        return any(one[0] for one in pool.agree(int(asked.is_set())))

    try:
        yield anywhere
    finally:
        signal.signal(signal.SIGTERM, before)
