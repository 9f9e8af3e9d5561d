"""Dynamo's refusals and warnings, in the user's terms: the line, the reason, what to do."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from piper.errors import Source, TraceError
from piper.frontend.refuse.side_effects import TracedEffects

WRONG_RESULT = "step must return a mean loss, or a pair (sum, count)"

_ADVICE = (
    ("data-dependent", "compute both sides and choose with torch.where; keep numbers as tensors"),
    ("dynamic control flow", "compute both sides and choose with torch.where"),
    ("tensor.item", "keep numbers as tensors: no .item(), .tolist() or float()"),
    ("backward()", "return the loss; the backward is derived from it"),
    ("builtin `print`", "remove the print: forward may only compute"),
)
_CAUSE = re.compile(
    r"\b(?:got|raised exception|exception type)? ?(\w+(?:Error|Exception)\(.*?\))", re.S
)
_HANDLED = ("_next_value", "_buffers", "_parameters")
_CHILD = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])\['(.*?)'\]")
_SIDE_EFFECTS = re.compile(r"side effects happened.*?: (\[.*\])", re.S)


@contextlib.contextmanager
def readable_errors(kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """Errors of these kinds as a TraceError with the user's line."""
    try:
        yield
    except kinds as error:
        stack: Any = getattr(error, "real_stack", None) or traceback.StackSummary()
        frames = [f for f in stack if not _is_ours(f.filename)]
        details = [frames[-1].line.strip()] if frames and frames[-1].line else []
        place = f" at {Source(frames[-1].filename, frames[-1].lineno or 0)}" if frames else ""
        reason, advice = _explain(str(error))
        if reason == WRONG_RESULT:
            raise TraceError(reason, legal=advice) from error
        message = f"the model does not trace{place}: {reason}"
        raise TraceError(message, details=details, legal=advice) from error


def _is_ours(file: str) -> bool:
    return "/torch/" in file or "/piper/frontend/" in file


def _explain(text: str) -> tuple[str, str]:
    if WRONG_RESULT in text:
        return WRONG_RESULT, "a tensor with one element, or a pair of such"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0].rstrip(":") if lines else "graph break"
    cause = _CAUSE.search(text)
    if cause and cause[1] not in reason:
        reason += f": {' '.join(cause[1].split())}"
    lowered = text.lower()
    for word, advice in _ADVICE:
        if word in lowered:
            return reason, advice
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    hints = [hint for hint in hints if "torch." not in hint]  # those are about torch.compile
    return reason, hints[0] if hints else "code that torch.compile(fullgraph=True) accepts"


def warn_of_side_effects(said: Sequence[warnings.WarningMessage], effects: TracedEffects) -> None:
    """Warn if the traced code changes Python state: the change is made at no step, or at the first."""
    lines = effects.lines
    for warning in said:
        found = _SIDE_EFFECTS.search(str(warning.message))
        if found:
            names = re.findall(r'"(.*?)"', found[1])
            # Our own counter, and tensors of the model, whose changes are refused elsewhere.
            names = [n for n in names if not n.endswith(_HANDLED) and effects.changed(n)]
            objects = [_readable(n) + (f" ({lines[n]})" if n in lines else "") for n in names]
            if objects:
                warnings.warn(
                    "the traced code changes Python state, which no step will do: "
                    + ", ".join(objects),
                    stacklevel=2,
                )


def _readable(name: str) -> str:
    """`L['self']._modules['model']._modules['a'].seen` -> `model.a.seen`."""
    name = _CHILD.sub(r".\1", name)
    return name.removeprefix("L['self'].")
