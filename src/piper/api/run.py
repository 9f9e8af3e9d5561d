"""Run: workers that are up; batches in, losses out, and the model's tensors on request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from piper.api.advice import with_advice
from piper.bodies.leaves import batch_constants, batch_leaves
from piper.errors import OutOfMemory, RunError
from piper.plan.types import Plan
from piper.runtime.assemble import differing_copies, whole_tensors

if TYPE_CHECKING:
    from torch import Tensor


class Workers(Protocol):
    """What every launcher gives: all ranks of a plan, driven from here."""

    def step(self, leaves: Mapping[str, Tensor]) -> list[dict[str, float]]: ...
    def tensors(self, kind: str) -> list[dict[str, Tensor]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """The loss of a step over the whole batch, and the count it was averaged over.

    `norm` is that of all gradients together, before clipping; None without clipping.
    """

    loss: float
    count: float
    norm: float | None = None


class Run:
    """Use as a context manager: leaving it ends the workers."""

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self.plan = plan
        self.workers = workers
        self.closed = False

    def step(self, batch: Any) -> StepResult:
        """Train on one global batch."""
        if self.closed:
            raise RunError("the run is closed", legal="steps inside of the with block")
        leaves = batch_leaves(batch)
        self._check(leaves)
        given, traced = batch_constants(batch), self.plan.batch_constants
        if given != traced:
            name = next(n for n in (*traced, *given) if given.get(n) != traced.get(n))
            raise RunError(
                f"{name} is {given.get(name, 'missing')}, but it was traced as "
                f"{traced.get(name, 'missing')}",
                legal="what changes from step to step as a tensor",
            )
        try:
            results = self.workers.step(leaves)
        except OutOfMemory as error:
            raise with_advice(error, self.plan) from None
        losses = {result["loss"] / result["count"] for result in results}
        if len(losses) != 1 and all(loss == loss for loss in losses):
            raise RunError(f"ranks disagree about the loss: {sorted(losses)}")
        count = results[0]["count"]
        squares = results[0].get("squares")
        norm = None if squares is None else math.sqrt(squares) / count
        return StepResult(results[0]["loss"] / count, count, norm)

    def _check(self, leaves: Mapping[str, Tensor]) -> None:
        for name, wanted in self.plan.batch.items():
            if name not in leaves:
                raise RunError(f"the batch has no {name}", legal=", ".join(self.plan.batch))
            leaf = leaves[name]
            dtype = str(leaf.dtype).removeprefix("torch.")
            if tuple(leaf.shape) != wanted.shape or dtype != wanted.dtype:
                raise RunError(
                    f"{name} is {dtype}{list(leaf.shape)}",
                    legal=f"{wanted.dtype}{list(wanted.shape)}, as in the example batch",
                )

    def parameters(self) -> dict[str, Tensor]:
        """All parameters, whole."""
        return whole_tensors(self.plan, "param", self.workers.tensors("param"))

    def gradients(self) -> dict[str, Tensor]:
        """The averaged gradients of the last step, whole."""
        return whole_tensors(self.plan, "grad", self.workers.tensors("grad"))

    def differing_replicas(self) -> list[str]:
        """Names of parameters whose copies are not bit-equal; empty is right."""
        return differing_copies(self.plan, "param", self.workers.tensors("param"))

    def close(self) -> None:
        self.closed = True
        self.workers.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
