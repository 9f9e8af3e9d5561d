"""NaN guard: steps of a run in; those whose gradients are not finite are taken, skipped or an error."""

from __future__ import annotations

from typing import Any, Literal, get_args

from piper.api.run import Run
from piper.api.step_result import StepResult
from piper.errors import RunError
from piper.training.records import Record

OnNan = Literal["go on", "skip", "stop"]
MOST_IN_A_ROW = 20  # skipped steps: parameters that are not finite themselves would skip them all
_LEGAL = "a smaller lr, clip=..., or data without such values"


def check_on_nan(on_nan: str) -> None:
    if on_nan not in get_args(OnNan):
        words = ", ".join(f'"{word}"' for word in get_args(OnNan))
        raise RunError(f"on_nan={on_nan!r}", legal=words)


class NanGuard:
    """What a training does about gradients that are not finite."""

    def __init__(self, run: Run, on_nan: OnNan) -> None:
        self.run = run
        self.on_nan = on_nan
        self.measures = run.plan.clip is not None
        self.skips = on_nan != "go on" and self.measures
        self._num = 0  # skipped since the last step
        self._warned = False
        if on_nan == "skip" and not self.measures:
            raise RunError(
                'on_nan="skip", but the job does not measure the norm of its gradients',
                legal="lower(clip=1.0), or lower(clip=math.inf), which measures it and clips nothing",
            )

    @property
    def waits(self) -> bool:
        """Whether a step may be skipped, or be the last."""
        return self.on_nan != "go on"

    def step(self, batch: Any, number: int) -> StepResult:
        result = self.run.step(batch, skip_nan=self.skips)
        if not result.skipped:
            return result
        self._num += 1
        if self.on_nan == "stop":
            details = [self.run.origin_of_nan()]
            text = f"step {number}: {_what(result)}; parameters are those of before"
            raise RunError(text, details=details, legal=_LEGAL)
        if self._num == MOST_IN_A_ROW:
            raise RunError(
                f"step {number}: {MOST_IN_A_ROW} batches one after the other have gradients that are "
                "not finite",
                details=[self.run.origin_of_nan()],
                legal=_LEGAL,
            )
        return result

    def text(self, result: StepResult) -> str:
        return f"{_what(result)}: the batch is skipped, and nothing has changed"

    def taken(self) -> int:
        """A step was taken: how many were skipped before it."""
        num, self._num = self._num, 0
        return num

    def not_finite(self, record: Record) -> str:
        """A step that is not finite was taken: training goes on with what no step can mend. What to say
        of it, once; or an error."""
        if self.on_nan == "stop" and not self.measures:
            raise RunError(
                f"step {record.step}: {record.not_finite}",
                details=["lower(clip=math.inf) has the norm, by which the first bad task is found"],
                legal=_LEGAL,
            )
        if self._warned:
            return ""
        self._warned = True
        return f'{record.not_finite}: not finite; training goes on (on_nan="stop" or "skip")'


def _what(result: StepResult) -> str:
    return f"loss {result.loss:.4g}, norm {result.norm}"
