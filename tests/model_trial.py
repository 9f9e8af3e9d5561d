"""A model in; seconds of its trace, and strategies under which it trains like one device, out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import piper
from piper.api.program import Program
from piper.errors import PiperError
from piper.frontend.islands import islands
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.verdict import Oracle, capture_of, lift_program
from tests.zoo_hf import Tiny

STEPS = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2, "microbatches": 2},
    "pp 2, 1F1B": {"pp": 2, "schedule": "1f1b", "microbatches": 4},
    "pp 2, dp 2, ZeRO-3, zbv": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "zbv",
        "microbatches": 2,
    },
    "pp 2, recompute": {"pp": 2, "microbatches": 4, "recompute": "nothing"},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "pp 2, dp 2, ep 2": {"pp": 2, "dp": 2, "ep": 2, "microbatches": 2}
}


@dataclass
class Trial:
    """What became of a model: `exact` has the largest relative error of a gradient by strategy,
    `refused` Piper's error by strategy, "trace" among them, `failed` everything that is a defect."""

    name: str
    seconds: float = 0.0
    islands: int = 0
    exact: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def try_model(name: str, tiny: Tiny, strategies: Iterable[str]) -> Trial:
    """Train in float64, casts to narrower dtypes lifted, under each strategy; seconds are of the CPU."""
    trial = Trial(name)
    torch.manual_seed(0)
    batches = [doubled(tiny.batch()) for _ in range(STEPS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        program = _attempt(
            trial,
            "trace",
            lambda: piper.trace(doubled_model(tiny.make_model), batches[0], tiny.step),
        )
        trial.seconds = time.process_time() - start
        if program is None:
            return trial
        trial.islands = sum(island.count for island in islands(capture_of(program)))
        if trial.islands:
            program = _attempt(trial, "trace", lambda: lift_program(program))
        for strategy in strategies if program else ():
            _attempt(trial, strategy, lambda s=strategy: _train(trial, program, s, batches))
    return trial


def _attempt(trial: Trial, what: str, run: Any) -> Any:
    try:
        return run()
    except PiperError as error:
        trial.refused[what] = str(error)
    except Exception as error:  # what must never be: it goes into the table
        trial.failed[what] = f"{type(error).__name__}: {error}"
    return None


def _train(trial: Trial, program: Program, strategy: str, batches: list[Any]) -> None:
    degrees = (STRATEGIES | OF_EXPERTS)[strategy]
    oracle = Oracle(program.apply(parallel(**degrees)), batches)
    with oracle.job.launch("loopback", adversary=True, seed=1) as run:
        errors = oracle.errors_of(run)
    if errors.exact and oracle.dtype == "float64":
        trial.exact[strategy] = errors.gradient
    else:
        trial.failed[strategy] = f"not exact in {oracle.dtype}: {errors}"
