"""Meter: times of steps in, what people want to know of them out."""

from __future__ import annotations

from collections import Counter

from piper.api.run import Run
from piper.cost.hardware import peak_flops
from piper.plan.types import Plan

MEMORY_EVERY = 50  # steps: asking costs a message to every rank
KEPT = 0.8  # of the estimated time of a step, from one step to the next


class Meter:
    """`unit` is what a step has `units` of: tokens, where the batch has any, else samples."""

    def __init__(self, run: Run, steps: int | None) -> None:
        self.run = run
        self.steps = steps
        self.unit, _ = unit_of(run.plan)
        self.peak = _peak(run)
        self.memory = 0
        self.num = 0
        self._seconds = 0.0

    def step(self, seconds: float) -> None:
        """Another step is done, which took so long."""
        self.num += 1
        if self.num % MEMORY_EVERY == 1:
            self.memory = max(found["peak"] for found in self.run.memory())
        # The first step allocates and connects: it says nothing about the others.
        self._seconds = seconds if self.num <= 2 else KEPT * self._seconds + (1 - KEPT) * seconds

    def mfu(self, plan: Plan, seconds: float) -> float | None:
        """The part of the devices' peak that the model's own floating-point operations make up."""
        return plan.flops / seconds / self.peak if self.peak and plan.flops else None

    @property
    def eta(self) -> float | None:
        """Seconds until all steps are done."""
        return None if self.steps is None else (self.steps - self.num) * self._seconds


def unit_of(plan: Plan) -> tuple[str, int]:
    """What a global batch is counted in: the elements of its first tensor of integers with a length."""
    for leaf in plan.batch.values():
        if "int" in leaf.dtype and len(leaf.shape) >= 2:
            return "tokens", leaf.shape[0] * leaf.shape[1]
    return "samples", next(iter(plan.batch.values())).shape[0]


def compute_dtype(plan: Plan) -> str:
    """The dtype of most of the model's elements."""
    sizes: Counter[str] = Counter()
    for found in plan.classes:
        for slot in found.slots:
            if slot.kind in ("param", "flat", "shard") and slot.base < 0:
                sizes[slot.dtype] += max(1, slot.shape[0] if slot.shape else 1)
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _peak(run: Run) -> float | None:
    """Of all devices together: ranks may share one."""
    if run.plan.device == "cpu":
        return None
    names = {found["identity"]: found["name"] for found in run.describe()}
    peaks = [peak_flops(name, compute_dtype(run.plan)) for name in names.values()]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None
