"""Callbacks: objects of the user's that are told what happens while a job trains."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from piper.errors import Call, PiperError, RunError, Source, did_you_mean, is_users
from piper.training.records import Record, Training


class Callback:
    """Override what you want to hear of. Any object with some of these methods will do.

    Under torchrun rank 0 alone is told, so that a callback must not ask the run for anything.
    """

    def on_start(self, facts: dict[str, Any]) -> None:
        """Training begins after `step` steps: `steps` in all, `ranks`, `mesh`, `plan` and `unit`."""

    def on_step(self, record: Record) -> None:
        """A step is done."""

    def on_evaluation(self, record: Record) -> None:
        """The record of the last step has an evaluation."""

    def on_checkpoint(self, facts: dict[str, Any]) -> None:
        """A checkpoint is written."""

    def on_failure(self, error: BaseException) -> None:
        """Training ends with an error or is interrupted."""

    def on_end(self, training: Training) -> None:
        """Training is done."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """All callbacks of a training, told one after another, or `silent`; one that raises ends it."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for callback in callbacks:
            _check(callback)
        self.callbacks = list(callbacks)
        self.silent = False
        self.before_raising: Callable[[], None] = lambda: None

    def tell(self, event: str, fact: Any) -> None:
        for callback in () if self.silent else self.callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                method(fact)
            except PiperError:
                self.before_raising()
                raise
            except Exception as error:
                self.before_raising()
                call = Call(f"{type(callback).__name__}.{event}", _line_of(error))
                raise RunError(f"{type(error).__name__}: {error}", call=call) from error

    def fail(self, error: BaseException) -> None:
        """Tell of a failure, which stays the error whatever a callback makes of it."""
        try:
            self.tell("on_failure", error)
        except PiperError as another:
            error.add_note(f"then {another}")


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        raise RunError(
            f"the callback {callback.__name__} is a class", legal=f"{callback.__name__}()"
        )
    names = [name for name in dir(callback) if name.startswith("on_")]
    for name in names:
        if name not in EVENTS:
            raise RunError(
                f"{type(callback).__name__}.{name} would never be called{did_you_mean(name, EVENTS)}",
                legal=", ".join(EVENTS),
            )
    if not names:
        raise RunError(
            f"{callback!r} is no callback", legal=f"an object with some of {', '.join(EVENTS)}"
        )


def _line_of(error: Exception) -> Source | None:
    """The innermost line of the user's own that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return Source(frames[-1].filename, frames[-1].lineno or 0) if frames else None
