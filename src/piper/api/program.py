"""Program: a graph with the history of its directives; `trace` makes it, `lower` ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from piper.api.job import Job
from piper.compiler.driver import Scheduled, Settings, foresee, lower
from piper.compiler.source import Source
from piper.compiler.stage_graphs import Stages
from piper.directives.schedule import Schedule
from piper.errors import PlanError
from piper.frontend.capture import Step
from piper.frontend.stage_choice import StageCut
from piper.ir.byte_sizes import parse_size
from piper.ir.graph import Graph
from piper.ir.graph_text import graph_to_text
from piper.ir.history import History, Record
from piper.ir.serial import graph_to_json
from piper.ir.well_formed import verify
from piper.passes.buckets import Bucketed
from piper.passes.preview import Foreseen, foreseen_in, preview_text
from piper.plan.types import Optimizer
from piper.runtime.factory import Factory, resolve_optimizer

if TYPE_CHECKING:
    from torch import nn

Strategy = Callable[[Schedule], None]
_PRECISIONS = {None: "", "fp32": "", "bf16": "bfloat16"}  # what a model computes in


def trace(
    make_model: Callable[[], nn.Module], example_batch: Any, step: Step, *, stages: str = "PP"
) -> Program:
    """Capture one training step of a model, without memory for its weights.

    `example_batch` is a global batch; `step(model, batch)` returns a mean loss, or (sum, count).
    Untagged code joins a region of the tag `stages`.
    """
    source = Source(make_model, example_batch, step, stages=stages)
    graph = source.graph()
    verify(graph)
    return Program(source, graph)


class Program:
    """A traced step under zero or more directives. Never changed: `apply` returns a new one."""

    def __init__(
        self,
        source: Source,
        graph: Graph,
        history: Sequence[Record] = (),
        stages: StageCut | None = None,
    ) -> None:
        self.source = source
        self.graph = graph
        self.history = History(history)
        self.stages = stages

    def apply(self, strategy: Strategy) -> Program:
        """The program after all directives of a strategy."""
        stages = Stages(self.source, self.stages)
        schedule = Schedule(self.graph, self.history, stages=stages)
        strategy(schedule)
        graph = schedule.finish()
        return Program(self.source, graph, schedule.history, stages.cut)

    def history_as_code(self) -> str:
        """The directives so far as a strategy that can be pasted."""
        return str(self.history)

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def to_json(self) -> bytes:
        return graph_to_json(self.graph)

    def preview(self, *, clip: float | None = None) -> str:
        """The communication that each directive will cause, without any code; `clip` as in `lower`."""
        return preview_text(self.foreseen(clip=clip), self.history)

    def foreseen(self, *, clip: float | None = None) -> list[Foreseen]:
        """The same as data."""
        return foreseen_in(foresee(self._scheduled, clip=clip))

    def diff(self, other: Program) -> str:
        """What differs in the plan of another program; empty if nothing does."""
        return self.lower().diff(other.lower())

    def lower(
        self,
        *,
        optimizer: Optimizer | Factory | None = None,
        device: str = "cpu",
        seed: int = 0,
        clip: float | None = None,
        late_clip: bool = False,
        precision: str | None = None,
        memory_limit: int | str | None = None,
    ) -> Job:
        """Make the program physical: bodies, communication, order, events, and one plan per class.

        `optimizer` is a function of parameters that makes a `torch.optim` optimizer, or
        `piper.adamw(...)` or `piper.sgd(...)`; without one it is SGD with a learning rate of 0.1.
        `seed` decides initial weights and dropout. `clip` is the largest norm that all gradients
        together may have: Updates wait for the norm or, with `late_clip`, start at once and are made
        again where it turns out too large.
        With `precision="bf16"` parameters and floating-point tensors of the batch are bfloat16 in all
        computation, with float32 masters that start from the model's own initial values; "fp32", or
        none, leaves the model as it is written.
        A plan that needs more than `memory_limit` ("80GiB") on some rank is refused.
        """
        if clip is not None and not (isinstance(clip, int | float) and clip > 0):
            raise PlanError(f"clip={clip!r}", legal="a norm above 0, or None")
        if late_clip and clip is None:
            raise PlanError("late_clip without clip", legal="clip=1.0, late_clip=True")
        chosen = resolve_optimizer(
            Optimizer("SGD", {"lr": 0.1}) if optimizer is None else optimizer
        )
        if precision not in _PRECISIONS:
            raise PlanError(
                f"precision={precision!r}", legal='"bf16", or "fp32" or None as written'
            )
        limit = None if memory_limit is None else parse_size(memory_limit)
        settings = Settings(chosen, device, seed, clip, late_clip, _PRECISIONS[precision], limit)
        lowered = lower(self._scheduled, settings)
        return Job(lowered, partial(self._evaluation, settings, lowered.buckets))

    def _evaluation(self, settings: Settings, buckets: Bucketed) -> Job:
        plain = replace(settings, clip=None, late_clip=False)
        return Job(lower(self._scheduled, plain, trained=buckets))

    @property
    def _scheduled(self) -> Scheduled:
        return Scheduled(self.source, self.graph, tuple(self.history), self.stages)
