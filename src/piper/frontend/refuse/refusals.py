"""Dynamo's refusals and warnings, in the user's terms: the line, the reason, what to do."""

from __future__ import annotations

import contextlib
import dis
import linecache
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from piper.bodies.failed_node import reason_of
from piper.bodies.initial import READS_VALUES
from piper.bodies.leaves import batch_leaves, users_name
from piper.errors import Call, PiperError, Source, TraceError, is_users
from piper.frontend.annotate import WRONG_TAG
from piper.frontend.refuse.side_effects import TracedEffects
from piper.frontend.refuse.ways_out import by_line, by_text, reason_of_refusal

WRONG_RESULT = "step must return a mean loss, or a pair (sum, count)"
WRONG_METRIC = "step must return its metrics by name, each a mean or a pair (sum, count)"
WRONG_PREDICTION = "predict must return a tensor, or a tuple or dictionary of tensors"
_RETURNED = re.compile(re.escape(WRONG_RESULT) + r", not (.*?)['\"]")
_METRIC = re.compile(re.escape(WRONG_METRIC) + r": (.*?)['\"]")
_RESULTS = (
    "`return loss`, a tensor with one element; `return total, count`; or (loss, {name: metric})"
)
_METRICS = "tensors with one element: {'accuracy': right.float().mean(), 'kept': (total, count)}"

# What the user's own code raised, or an operator that it called.
_RAISED = re.compile(
    r"(?:raised exception|fake tensor call|[Oo]bserved exception).*?"
    r"(?P<kind>\w+(?:Error|Exception))\((['\"])(?P<text>.*?)\2,?\)",
    re.S,
)
_REFUSED = re.compile(
    r"context: (?P<kind>\w+Error) <.*?>: (?P<text>.*)"
)  # by torch's argument parser
_UNBOUND = re.compile(r"func='(?P<name>.*?)' (?P<file>.*?):(?P<line>\d+); args")
_NO_RETURN = ": it has no return"

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Hints that speak of torch's own matters.
_NOT_FOR_USERS = ("torch.", "PyTorch", "Dynamo", "http", "graph break", "graph_break")
_OF_DYNAMO = re.compile(r" with `torch\._dynamo\.config\..*")
_CAUSE = re.compile(
    r"\b(?:got|raised exception|exception type)? ?(\w+(?:Error|Exception)\(.*?\))", re.S
)
_HANDLED = re.compile(r"(?:_next_value|_buffers|_parameters)(?:'\])?$")
_CHILD = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])\['(.*?)'\]")
_GLOBAL = re.compile(r"G\['__import_(.*?)'\](?:\.(.*))?")
_SIDE_EFFECTS = re.compile(r"side effects happened.*?: (\[.*\])", re.S)


@contextlib.contextmanager
def readable_errors(
    refusals: tuple[type[Exception], ...], step: Any = None, batch: Any = None
) -> Iterator[None]:
    """Whatever tracing raises, as a TraceError with the user's line; `refusals` are Dynamo's own. What
    is wrong with the results of a `step` has the line where that begins; what the code itself raises
    is told with what the `batch` has."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        stack: Any = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
        frames = [f for f in stack if not _is_ours(f.filename)]
        line = (frames[-1].line or "").strip() if frames else ""
        place = f" at {Source(frames[-1].filename, frames[-1].lineno or 0)}" if frames else ""
        reason, advice = _explain(_text(error, refusals), line)
        if reason.startswith((WRONG_RESULT, WRONG_METRIC, WRONG_PREDICTION)):
            reason, advice = _of_results(reason, advice, step)
            raise TraceError(reason, call=call_of(step), legal=advice) from error
        details = [line, *_called_from(frames)] if line else []
        message = f"the model does not trace{place}: {reason}"
        if WRONG_TAG in str(error):
            legal = 'annotate("PP"): regions count by themselves; or annotate("PP", 0)'
            raise TraceError(f"{WRONG_TAG}{place}", details=[line], legal=legal) from error
        raised = _RAISED.search(str(error)) or _REFUSED.search(str(error))
        if unbound := _UNBOUND.search(str(error)):
            called = Source(unbound["file"], int(unbound["line"]))
            message = (
                f"the step calls {unbound['name']}{place} with arguments that it does not take"
            )
            advice = f"{linecache.getline(called.file, called.line).strip()} ({called})"
        elif raised and isinstance(error, refusals):
            kind, text = raised["kind"], raised["text"].replace("immutable_", "")
            message = f"the step raises {kind}{place}: {' '.join(text.split())}"
            advice = by_line(line).legal or f"what the batch has: {_batch_text(batch)}"
        elif isinstance(error, refusals) and (own := reason_of_refusal(_said(error), line)):
            message = f"{own} ({place.removeprefix(' at ')})" if place else own
            details.append(f"torch says: {reason}")
        raise TraceError(message, details=details, legal=advice) from error


def _called_from(frames: Sequence[Any]) -> Iterator[str]:
    """The user's own line, where the last one is that of an installed package."""
    own = [frame for frame in frames if is_users(frame.filename)]
    if own and own[-1] is not frames[-1]:
        yield f"called at {Source(own[-1].filename, own[-1].lineno or 0)}: {own[-1].line}"


def _of_results(reason: str, advice: str, step: Any) -> tuple[str, str]:
    """What is wrong with the results of a step, and what to return; of transformers' models, too."""
    if reason.endswith(_NO_RETURN) and _returns(getattr(step, "__code__", None)):
        reason = reason.removesuffix(_NO_RETURN)
        advice += "; models of transformers make a loss where they are given labels"
    if "Output" in reason:
        advice = "`return model(...).loss`"
    return reason, advice


def _returns(code: CodeType | None) -> bool:
    """Whether code returns anything but a None that is written down, or none at all."""
    before = None
    for instruction in dis.get_instructions(code) if code else ():
        none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if instruction.opname == "RETURN_VALUE" and not none:
            return True
        before = instruction
    return False


def call_of(step: Any) -> Call:
    """A user's step, with the line where it begins."""
    while hasattr(step, "step"):  # what makes something else of the user's own
        step = step.step
    code = getattr(step, "__code__", None)
    source = Source(code.co_filename, code.co_firstlineno) if code else None
    return Call(getattr(step, "__name__", "step"), source)


@contextlib.contextmanager
def readable_building() -> Iterator[None]:
    """Torch's errors while make_model runs, as a TraceError; the user's own stay as they are."""
    try:
        yield
    except (PiperError, OSError, *READS_VALUES):
        raise
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if not _is_ours(frame.filename)]
        of_torch = _is_ours(stack[-1].filename) or "FakeTensor" in str(error)
        if not frames or not of_torch:
            raise
        last = frames[-1]
        raise TraceError(
            f"make_model fails at {Source(last.filename, last.lineno or 0)}: {reason_of(error)}",
            details=[(last.line or "").strip()],
            legal=by_line(last.line or "").legal
            or "plain parameters and buffers, made by operators: make_model runs on fake tensors, "
            "which have no content",
        ) from error


def _text(error: Exception, refusals: tuple[type[Exception], ...]) -> str:
    """Refusals speak for themselves; of others the kind says something too."""
    if isinstance(error, refusals):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip()}"


def _said(error: Exception) -> str:
    """What torch says of a refusal, without the lines of the user's that follow."""
    return str(error).partition("from user code")[0]


def _is_ours(file: str) -> bool:
    elsewhere = not os.path.isabs(file) and not is_users(file)
    return "/torch/" in file or file.startswith(_OWN) or elsewhere


def _explain(text: str, line: str) -> tuple[str, str]:
    if WRONG_RESULT in text:
        returned = _RETURNED.search(text)
        return WRONG_RESULT + (f", not {returned[1]}" if returned else ""), _RESULTS
    if WRONG_PREDICTION in text:
        return WRONG_PREDICTION, "tensors with samples in dim 0, such as model(batch['x'])"
    if metric := _METRIC.search(text):
        return f"{WRONG_METRIC}: {metric[1]}", _METRICS
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = _OF_DYNAMO.sub("", lines[0]).rstrip(":") if lines else "graph break"
    cause = _CAUSE.search(text)
    if cause and cause[1] not in reason:
        reason += f": {' '.join(cause[1].split())}"
    if advice := by_line(line).legal or by_text(text).legal:
        return reason, advice
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    hints = [hint for hint in hints if not any(word in hint for word in _NOT_FOR_USERS)]
    return reason, hints[0] if hints else "code that torch.compile(fullgraph=True) accepts"


def _batch_text(batch: Any) -> str:
    """`x float32[8, 6], y int64[8]`."""
    return ", ".join(
        f"{users_name(name)} {str(leaf.dtype).removeprefix('torch.')}{_sizes(leaf)}"
        for name, leaf in batch_leaves(batch).items()
    )


def _sizes(leaf: Any) -> list[int | str]:
    """A number of rows that was left open is `rows`."""
    return [size if isinstance(size, int) else "rows" for size in leaf.shape]


def warn_of_side_effects(said: Sequence[warnings.WarningMessage], effects: TracedEffects) -> None:
    """Warn if the traced code changes Python state: the change is made at no step, or at the first."""
    lines = effects.lines
    for warning in said:
        found = _SIDE_EFFECTS.search(str(warning.message))
        if found:
            names = re.findall(r'"(.*?)"', found[1])
            # Our own counter, and tensors of the model, whose changes are refused elsewhere.
            names = [n for n in names if not _HANDLED.search(n) and effects.changed(n)]
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
    if found := _GLOBAL.fullmatch(name):
        return found[2] or f"a global of {found[1]}"
    return name.removeprefix("L['self'].")
