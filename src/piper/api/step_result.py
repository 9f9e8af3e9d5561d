"""StepResult: what a step has to say; StepUnderWay: a step that has begun, and says it later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from piper.errors import RunError


@dataclass(frozen=True)
class StepResult:
    """The loss of a step over the whole batch, and the count it was averaged over.

    `norm` is that of all gradients together, before clipping; None without clipping. `metrics` are those
    that `step` returns beside the loss, over the whole batch, and `metric_counts` what each was averaged
    over: NaN where that is 0. A step that was `skipped` has changed nothing.
    """

    loss: float
    count: float
    norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_counts: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False


class StepUnderWay:
    """A step that its ranks have begun. `result()` waits for it, and for those begun before."""

    def __init__(self, finish_first: Callable[[], None]) -> None:
        self._finish_first = finish_first
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether `result` does not wait any more."""
        return self._result is not None or self._error is not None

    def result(self) -> StepResult:
        """Raises what the step, or one that was begun before it, has failed with."""
        while not self.over:
            self._finish_first()
        if self._result is None:
            assert self._error is not None
            raise self._error
        return self._result

    def end(self, result: StepResult) -> None:
        self._result = result

    def fail(self, error: BaseException) -> None:
        self._error = error

    def __repr__(self) -> str:
        return f"<StepUnderWay, {'over' if self.over else 'going on'}>"


def step_result(results: list[dict[str, Any]]) -> StepResult:
    losses = {result["loss"] / result["count"] for result in results}
    if len(losses) != 1 and all(loss == loss for loss in losses):
        raise RunError(f"ranks disagree about the loss: {sorted(losses)}")
    count = results[0]["count"]
    squares = results[0].get("squares")
    norm = None if squares is None else math.sqrt(squares) / count
    pairs = {
        unquote(name.removeprefix("metric.")): pair
        for name, pair in results[0].items()
        if name.startswith("metric.")
    }
    metrics = {name: total / num if num else math.nan for name, (total, num) in pairs.items()}
    counts = {name: num for name, (_, num) in pairs.items()}
    skipped = results[0].get("skipped", False)
    if any(result.get("skipped", False) != skipped for result in results):
        raise RunError("some ranks skipped the step, and others did not")
    return StepResult(results[0]["loss"] / count, count, norm, metrics, counts, skipped)
