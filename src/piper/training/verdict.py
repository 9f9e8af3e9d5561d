"""Verdict: whether a program trains like one device, and how finely that could be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper.api.program import Program, trace
from piper.api.run import Run
from piper.cost.machine import Machine
from piper.errors import PiperError, RunError
from piper.frontend.capture.capture import Capture
from piper.frontend.capture.lifted import LiftedStep
from piper.frontend.islands import Island, islands, narrowest
from piper.plan.optimizers import Optimizer, adamw
from piper.runtime.factory import Factory
from piper.training.rounding import rounding
from piper.training.verify import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    PARAMETER_BOUND,
    Bounds,
    Errors,
    compare,
    train_one_device,
)

ADAMW = adamw(lr=1e-3)
ROUNDINGS = 8  # of one number, at the narrowest precision that it passes through


class Oracle:
    """One device, trained with a step a batch: what runs of a program are held to.

    `dtype` is the narrowest that the program computes in, and decides the bounds.
    """

    def __init__(
        self,
        program: Program,
        batches: Sequence[Any],
        optimizer: Optimizer | Factory = ADAMW,
        *,
        weights: Any = None,
        machine: Machine | str | None = None,
    ) -> None:
        dtype = narrowest(capture_of(program)) or torch.float64
        eps = torch.finfo(dtype).eps
        self.dtype = str(dtype).removeprefix("torch.")
        self.bounds = bounds_of(eps)
        self.job = program.lower(optimizer=optimizer, weights=weights, machine=machine)
        self.batches = batches
        self.reference = train_one_device(self.job, batches)
        _check_finite(self.reference.losses)
        self.explained = rounding(self.job, batches, self.reference, eps=eps)

    def errors_of(self, run: Run) -> Errors:
        """Train a run of the job on the same batches, and compare."""
        return compare(
            run, self.batches, self.reference, bounds=self.bounds, explained=self.explained
        )


def _check_finite(losses: Sequence[float]) -> None:
    for step, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            raise RunError(
                f"the loss of one device is {loss} in step {step}: there is nothing to compare",
                legal="batches and weights with a finite loss, and a model that has one in float64 "
                "(float64's least number is no number in float32)",
            )


@dataclass(frozen=True)
class Measured:
    """A run's errors, and the oracle that found them."""

    errors: Errors
    oracle: Oracle


@dataclass(frozen=True)
class Verdict:
    """`proof` computes in float64 throughout: casts of the model to narrower dtypes are lifted.

    A model with such casts, in `islands`, is also run `as_written`, within the bounds of their dtype.
    `refusal` says why casts could not be lifted; the proof is then no finer than their dtype.
    """

    proof: Measured
    as_written: Measured | None = None
    islands: Sequence[Island] = ()
    refusal: str = ""

    @property
    def exact(self) -> bool:
        both = (self.proof, self.as_written)
        return all(measured.errors.exact for measured in both if measured is not None)


def verify(
    program: Program,
    batches: Sequence[Any],
    optimizer: Optimizer | Factory = ADAMW,
    *,
    weights: Any = None,
    machine: Machine | str | None = None,
    launch: str = "loopback",
    **options: Any,
) -> Verdict:
    """Train a program in float64, and its module on one device, with a step a batch, and compare.

    Both start from `weights`, or from the same initial values; these and `machine` are as `lower` takes
    them."""

    def measured(program: Program) -> Measured:
        oracle = Oracle(program, batches, optimizer, weights=weights, machine=machine)
        with oracle.job.launch(launch, **options) as run:
            return Measured(oracle.errors_of(run), oracle)

    written = measured(program)
    if written.oracle.dtype == "float64":
        return Verdict(written)
    found = islands(capture_of(program))
    try:
        lifted = lift_program(program)
    except PiperError as error:  # the step insists on a dtype
        return Verdict(written, islands=found, refusal=error.message)
    return Verdict(measured(lifted), written, found)


def lift_program(program: Program) -> Program:
    """The same model under the same directives, its casts to narrower dtypes lifted to float64."""
    source = program.source
    step = LiftedStep(source.step)
    lifted = trace(source.make_model, source.batch, step, stages=source.stages)
    return lifted.apply(program.history) if program.history else lifted


def bounds_of(eps: float) -> Bounds:
    """Law 1 in float64; of narrower numbers a few roundings."""
    least = ROUNDINGS * eps
    return Bounds(max(least, LOSS_BOUND), max(least, GRADIENT_BOUND), max(least, PARAMETER_BOUND))


def capture_of(program: Program) -> Capture:
    """The program at its example batch."""
    return program.source.captured(program.source.batch_size)
