"""Piper: programmable distributed training for PyTorch.

Annotate a model, trace it, apply a strategy of directives, lower it to plans, launch. Names load when
they are first used, so that what needs no torch starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from piper.no_collections import no_collections

if TYPE_CHECKING:
    from piper import schedules, strategies
    from piper.api.job import Job, load_job
    from piper.api.program import Program, load_program, trace
    from piper.api.run import Run
    from piper.api.step_result import StepResult
    from piper.bodies.expert_ops import grouped_mm
    from piper.directives.schedule import Schedule
    from piper.errors import PiperError
    from piper.frontend.annotate import annotate, tag
    from piper.frontend.mixture import mixture
    from piper.ir.precisions import Precision
    from piper.ir.select import where
    from piper.mesh import Mesh
    from piper.plan.optimizers import adamw, sgd
    from piper.plan.types import Plan
    from piper.runtime.launch.local_pool import LocalPool
    from piper.runtime.launch.parent_process import warm_up
    from piper.runtime.launch.shares import Share
    from piper.training.callbacks import Callback
    from piper.training.elastic import Elastic
    from piper.training.log_writers import JsonLines, TensorBoard
    from piper.training.loop import train
    from piper.training.profile import Profile, profile
    from piper.training.records import Training

__version__ = "0.1.0"

_HOMES = {
    "Callback": "piper.training.callbacks",
    "Elastic": "piper.training.elastic",
    "Job": "piper.api.job",
    "JsonLines": "piper.training.log_writers",
    "LocalPool": "piper.runtime.launch.local_pool",
    "Mesh": "piper.mesh",
    "PiperError": "piper.errors",
    "Plan": "piper.plan.types",
    "Precision": "piper.ir.precisions",
    "Profile": "piper.training.profile",
    "Program": "piper.api.program",
    "Run": "piper.api.run",
    "Schedule": "piper.directives.schedule",
    "Share": "piper.runtime.launch.shares",
    "StepResult": "piper.api.step_result",
    "TensorBoard": "piper.training.log_writers",
    "Training": "piper.training.records",
    "adamw": "piper.plan.optimizers",
    "annotate": "piper.frontend.annotate",
    "grouped_mm": "piper.bodies.expert_ops",
    "load_job": "piper.api.job",
    "load_program": "piper.api.program",
    "profile": "piper.training.profile",
    "mixture": "piper.frontend.mixture",
    "sgd": "piper.plan.optimizers",
    "tag": "piper.frontend.annotate",
    "trace": "piper.api.program",
    "train": "piper.training.loop",
    "warm_up": "piper.runtime.launch.parent_process",
    "where": "piper.ir.select",
}
_MODULES = ("schedules", "strategies")

__all__ = [
    "Callback", "Elastic", "Job", "JsonLines", "LocalPool", "Mesh", "PiperError", "Plan", "Precision",
    "Profile", "Program", "Run", "Schedule", "Share", "StepResult", "TensorBoard", "Training", "adamw",
    "annotate", "grouped_mm", "load_job", "load_program", "mixture", "profile", "schedules", "sgd",
    "strategies", "tag", "trace", "train", "warm_up", "where",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker would take it that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _HOMES and name not in _MODULES:
            raise AttributeError(f"module 'piper' has no attribute {name!r}")
        with no_collections():
            module = importlib.import_module(_HOMES.get(name, f"piper.{name}"))
        found = getattr(module, name) if name in _HOMES else module
        globals()[name] = found
        return found
