"""Records: what a training run measured, step by step."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from piper.training.position import Position


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `norm` is None without clipping, `mfu` where the hardware is not known; `memory` is the
    most that any rank had in use so far, in bytes, as it was measured last. `retried` says how often
    some rank read its data again, `skipped` how many batches could not be read since the last step.
    `not_trained` says how many batches since then gave gradients that are not finite, and no step.
    `metrics` are what `step` returns beside its loss; `evaluation_metrics` those of the evaluation."""

    step: int
    loss: float
    norm: float | None
    lr: float
    ms: float
    per_second: float
    mfu: float | None
    memory: int
    evaluation: float | None = None
    retried: int = 0
    skipped: int = 0
    not_trained: int = 0
    metrics: dict[str, float] = {}
    evaluation_metrics: dict[str, float] = {}

    @property
    def not_finite(self) -> str:
        """`loss nan`, `norm inf`, or nothing if both are numbers."""
        if not math.isfinite(self.loss):
            return f"loss {self.loss}"
        return "" if self.norm is None or math.isfinite(self.norm) else f"norm {self.norm}"

    def facts(self) -> dict[str, Any]:
        """For JSON, which has no numbers that are not finite: those are "nan", "inf" or "-inf"."""
        return {k: json_number(v) for k, v in msgspec.structs.asdict(self).items()}

    def step_facts(self) -> dict[str, Any]:
        """The same without the evaluation, which comes after the step."""
        return {k: v for k, v in self.facts().items() if not k.startswith("evaluation")}


class Training(msgspec.Struct):
    """All steps of a training run, and what came of them. `unit` is what `per_second` counts; `position`
    is where it stands in its data."""

    unit: str
    records: list[Record] = []
    seconds: float = 0.0
    position: Position = Position()
    stopped: bool = False  # before its end, because the process was asked to end
    saved: bool | None = None  # whether the last step is, in a folder of checkpoints

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def loss(self) -> float:
        """The last step's."""
        return self.records[-1].loss if self.records else math.nan

    @property
    def evaluation(self) -> float | None:
        """The last evaluation's loss."""
        found = [r.evaluation for r in self.records if r.evaluation is not None]
        return found[-1] if found else None

    @property
    def metrics(self) -> dict[str, float]:
        """The last step's."""
        return self.records[-1].metrics if self.records else {}

    @property
    def skipped(self) -> int:
        """Batches that could not be read and were left out."""
        return sum(record.skipped for record in self.records)

    @property
    def not_trained(self) -> int:
        """Batches whose gradients were not finite, and that were no steps."""
        return sum(record.not_trained for record in self.records)

    def as_text(self) -> str:
        if not self.records:
            return "no steps"
        first, last = self.records[0], self.records[-1]
        text = (
            f"{last.step} steps in {self.seconds:.1f} s: loss {first.loss:.4f} -> {last.loss:.4f}"
        )
        if self.evaluation is not None:
            text += f", evaluation {self.evaluation:.4f}"
            evaluated = [record for record in self.records if record.evaluation is not None]
            text += "".join(
                f", {metric_text(*m)}" for m in evaluated[-1].evaluation_metrics.items()
            )
        if self.skipped:
            text += f", {self.skipped} batch{'es' * (self.skipped > 1)} left out"
        if self.not_trained:
            text += f", {self.not_trained} skipped for NaN"
        return text

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Training: {self.as_text()}>"

    def to_json(self) -> bytes:
        facts = {
            "unit": self.unit,
            "seconds": self.seconds,
            "records": [record.facts() for record in self.records],
        }
        return msgspec.json.encode(facts)


def metric_text(name: str, value: float) -> str:
    return f"{name} {value:.4g}"


def json_number(value: Any) -> Any:
    """What JSON can have of a number, or of numbers by name."""
    if isinstance(value, dict):
        return {name: json_number(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
