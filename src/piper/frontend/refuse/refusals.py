"""Dynamo's refusals and warnings, in the user's terms: the line, the reason, what to do."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from piper.bodies.failed_node import reason_of
from piper.bodies.initial import READS_VALUES
from piper.bodies.leaves import batch_leaves, users_name
from piper.errors import Call, PiperError, Source, TraceError
from piper.frontend.annotate import WRONG_TAG
from piper.frontend.refuse.side_effects import TracedEffects

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
    r"(\w+(?:Error|Exception))\((['\"])(.*?)\2,?\)",
    re.S,
)

# Words of the user's line, then of Dynamo's text -> what to do.
_ADVICE_BY_LINE = (
    (r"layer_?drop", "layerdrop=0 in the model's configuration: chance chooses no layers"),
    (r"\brandom\.|\brng\.", "torch.rand and the like: numbers of torch's are the same everywhere"),
    (r"\btime\.", "no clock inside of the step"),
    (
        r"\.cuda\(|device",
        "no .cuda() and no device in the model's code: lower(device=...) chooses it",
    ),
    (r"\bscaler\.", 'the loss itself; precision="bf16" needs no scaling of gradients'),
    (
        r"zero_grad\(|optimi[sz]er\.step\(|\bopt\.step\(|sched\w*\.step\(",
        "return the loss; lower(optimizer=...) makes the optimizer, and every step steps it",
    ),
)
_ADVICE = (
    ("data-dependent", "compute both sides and choose with torch.where; keep numbers as tensors"),
    ("dynamic control flow", "compute both sides and choose with torch.where"),
    ("autograd.grad", "the derivative written out in operators: `step` is differentiated once"),
    ("unbacked symbol", "keep numbers as tensors: no .item(), .tolist() or float()"),
    ("tensor.item", "keep numbers as tensors: no .item(), .tolist() or float()"),
    ("tolist()", "keep numbers as tensors: no .item(), .tolist() or float()"),
    ("requires_grad_()", "parameters, made in make_model, for all that gets a gradient"),
    ("backward()", "return the loss; the backward is derived from it"),
    ("manual_seed", "no seed inside of the step: lower(seed=...) decides what is drawn"),
    ("fork_rng", "no generator inside of the step: lower(seed=...) decides what is drawn"),
    ("generator", "no generator inside of the step: lower(seed=...) decides what is drawn"),
    ("sparse tensor", "dense tensors, or an index and torch.gather"),
    ("nested_tensor", "padded tensors and a mask"),
    ("torch.jit", "the module as it was written, without torch.jit"),
    ("pack_padded_sequence", "the padded batch; mask what padding adds to the loss"),
    ("nn.param", "parameters and their dtypes made in make_model"),
    ("device", "no .cuda() and no device in the model's code: lower(device=...) chooses it"),
)
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Hints that speak of torch's own matters.
_NOT_FOR_USERS = ("torch.", "PyTorch", "Dynamo", "http", "graph break", "graph_break")
_OF_DYNAMO = re.compile(r" with `torch\._dynamo\.config\..*")
_CAUSE = re.compile(
    r"\b(?:got|raised exception|exception type)? ?(\w+(?:Error|Exception)\(.*?\))", re.S
)
_HANDLED = re.compile(r"(?:_next_value|_buffers|_parameters)(?:'\])?$")
_CHILD = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])\['(.*?)'\]")
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
            raise TraceError(reason, call=call_of(step), legal=advice) from error
        message = f"the model does not trace{place}: {reason}"
        if WRONG_TAG in str(error):
            legal = 'annotate("PP"): regions count by themselves; or annotate("PP", 0)'
            raise TraceError(f"{WRONG_TAG}{place}", details=[line], legal=legal) from error
        raised = _RAISED.search(str(error))
        if raised and isinstance(error, refusals):
            kind, _, text = raised.groups()
            message = f"the step raises {kind}{place}: {' '.join(text.split())}"
            advice = _by_line(line) or f"what the batch has: {_batch_text(batch)}"
        raise TraceError(message, details=[line] if line else [], legal=advice) from error


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
            legal=_by_line(last.line or "")
            or "plain parameters and buffers, made by operators: make_model runs on fake tensors, "
            "which have no content",
        ) from error


def _text(error: Exception, refusals: tuple[type[Exception], ...]) -> str:
    """Refusals speak for themselves; of others the kind says something too."""
    if isinstance(error, refusals):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip()}"


def _is_ours(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OWN) or not os.path.isabs(file)


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
    lowered = text.lower()
    if advice := _by_line(line):
        return reason, advice
    for word, advice in _ADVICE:
        if word in lowered:
            return reason, advice
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    hints = [hint for hint in hints if not any(word in hint for word in _NOT_FOR_USERS)]
    return reason, hints[0] if hints else "code that torch.compile(fullgraph=True) accepts"


def _by_line(line: str) -> str:
    return next((advice for pattern, advice in _ADVICE_BY_LINE if re.search(pattern, line)), "")


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
    return name.removeprefix("L['self'].")
