"""Mean: results of several batches in, their loss and metrics together out, each by its own count."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from piper.api.step_result import StepResult

Pair = tuple[float, float]  # sum and count


@dataclass
class Mean:
    """Over all batches so far, as if they were one."""

    num: int = 0
    _loss: Pair = (0.0, 0.0)
    _metrics: dict[str, Pair] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        self.num += 1
        self._loss = _added(self._loss, result.loss, result.count)
        for name, value in result.metrics.items():
            before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = _added(before, value, result.metric_counts[name])

    @property
    def loss(self) -> float:
        return _mean(self._loss)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: _mean(pair) for name, pair in self._metrics.items()}


def _added(pair: Pair, mean: float, count: float) -> Pair:
    total, num = pair
    return (total + mean * count, num + count) if count else pair


def _mean(pair: Pair) -> float:
    return pair[0] / pair[1] if pair[1] else math.nan
