"""Errors for the user: which rule was broken, where in the user's file, with what, what is legal."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import msgspec

# Nobody's own code: this package, the standard library, installed packages and their scripts.
_ELSEWHERE = (
    os.path.dirname(os.path.abspath(__file__)),
    *(os.path.abspath(p) for key, p in sysconfig.get_paths().items() if key != "data"),
)

_COMMANDS = os.path.join(_ELSEWHERE[0], "cli", "main.py")
_LINE = re.compile(r"(?:\.py|>):\d+")
_CELL = "<ipython-input-"

P = ParamSpec("P")
R = TypeVar("R")


class Source(msgspec.Struct, frozen=True):
    """A line of the user's own code."""

    file: str
    line: int

    def __str__(self) -> str:
        path = os.path.relpath(self.file)
        return f"{self.file if path.startswith('..') else path}:{self.line}"


class Call(msgspec.Struct, frozen=True):
    """One use of a directive: its name and the line that issued it."""

    name: str
    source: Source | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


def is_users(file: str) -> bool:
    """Whether a file, or a cell of a notebook, holds code of the user's own."""
    if os.path.basename(file).startswith(_CELL):
        return True
    return not file.startswith("<") and not os.path.abspath(file).startswith(_ELSEWHERE)


def user_source() -> Source | None:
    """The innermost line outside this package, or None when the package calls itself, as a command of
    `piper` does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _COMMANDS:
        if is_users(frame.f_code.co_filename):
            return Source(os.path.abspath(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return None


@contextmanager
def naming_line(name: str) -> Iterator[None]:
    """Errors that name no line of the user's get that of the user's call of `name`."""
    try:
        yield
    except PiperError as error:
        source, told = user_source(), error.call is not None or isinstance(error, RankLost)
        if source is not None and not told and not _LINE.search(str(error)):
            error.at(Call(name, source))
        raise


def naming_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments, where it does not take them, are one error with the user's line."""
    taken = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            taken.bind(*args, **kwargs)
        except TypeError as error:
            names = [name for name in taken.parameters if name != "self"]
            unknown = next((name for name in kwargs if name not in names), None)
            near = did_you_mean(unknown, names) if unknown else ""
            raise ArgumentError(
                f"{error}{near}",
                call=Call(function.__name__, user_source()),
                legal=", ".join(names),
            ) from None
        return function(*args, **kwargs)

    return call


class PiperError(ValueError):
    """The user asked for something that cannot be; nothing was changed.

    `call` is the directive or command, `requirement` its numbered requirement, `details` the nodes
    and facts involved, `legal` what would have been accepted.
    """

    def __init__(
        self,
        message: str,
        *,
        call: Call | None = None,
        requirement: int | None = None,
        details: Iterable[str] = (),
        legal: str | None = None,
    ) -> None:
        self.message = message
        self.call = call
        self.requirement = requirement
        self.details = tuple(details)
        self.legal = legal
        super().__init__(self._text())

    def reword(self, message: str, details: Iterable[str], legal: str | None) -> None:
        """Say the same in the words of another language, such as that of the command line."""
        self.message, self.details, self.legal = message, tuple(details), legal
        self.args = (self._text(),)

    def at(self, call: Call) -> None:
        """Have it name a call."""
        self.call = call
        self.args = (self._text(),)

    def _text(self) -> str:
        head = f"{self.call}: {self.message}" if self.call else self.message
        if self.requirement is not None:
            head += f" (requirement {self.requirement})"
        lines = [head, *(f"    {line}" for line in self.details)]
        if self.legal:
            lines.append(f"  legal: {self.legal}")
        return "\n".join(lines)


class TraceError(PiperError):
    """The model or step cannot be captured as one graph."""


class SelectError(PiperError):
    """A `where(...)` names a tag that does not exist, or selects nothing."""


class ArgumentError(PiperError, TypeError):
    """A directive was called with arguments that it does not take."""


class NoSuchAttribute(PiperError, AttributeError):
    """Something was asked for what only a later stage has: a program for a launch."""


class MeshError(PiperError):
    """A mesh, axis, slice or stream is not what the directive needs."""


class PlaceError(PiperError):
    """A chunk on no slice, on two slices, or on slices that cannot exchange data."""


class AxisError(PiperError):
    """A mesh axis of a chunk that no directive owns, or that two directives own."""


class ShardError(PiperError):
    """A region that is not of the form whose experts can be sharded."""


class TensorError(PiperError):
    """Tensors that cannot be cut as asked."""


class SplitError(PiperError):
    """A batch that cannot be cut as asked."""


class RecomputeError(PiperError):
    """A region that cannot be computed again as asked."""


class CutError(PiperError):
    """A model that cannot be cut into stages as asked."""


class OrderError(PiperError):
    """An order that is cyclic, repeats a chunk, or disagrees with the placement."""


class ScheduleError(PiperError):
    """A schedule that does not exist for these numbers, or a table that is not one."""


class StrategyError(PiperError):
    """A strategy file that is not of the published form, or a strategy that has no such form."""


class PlanError(PiperError):
    """A plan that breaks one of the laws that are checked before a run."""


class CheckError(PlanError):
    """A plan for which one of the checker's proofs fails; the details are a witness."""


class RunError(PiperError):
    """A rank failed during a run."""


class RankLost(RunError):
    """Ranks died, hang or cannot be reached: `ranks`. The `survivors` still answer."""

    def __init__(
        self, message: str, *, ranks: Sequence[int], survivors: Sequence[int], **more: Any
    ) -> None:
        self.ranks = tuple(ranks)
        self.survivors = tuple(survivors)
        super().__init__(message, **more)


class OutOfMemory(RunError):
    """A rank could not get the memory for a task; `held` has the bytes that it holds, by use."""

    def __init__(self, message: str, *, held: Mapping[str, int], **more: Any) -> None:
        self.held = dict(held)
        super().__init__(message, **more)


class WeightsError(PiperError):
    """Weights that are not those of the model."""


class FileError(PiperError):
    """A file that does not exist, cannot be read or does not hold what it must."""


class OptionError(PiperError):
    """A command or option that does not exist, or a value that an option does not take."""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or nothing if no known name is near."""
    near = nearest(name, known)
    return f" (did you mean {near!r}?)" if near else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that is nearest; "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return next(iter([*near, *(k for k in known if k.lower() == name.lower())]), "")
