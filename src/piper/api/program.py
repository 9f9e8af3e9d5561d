"""Program: a graph with the history of its directives; `trace` makes it, `lower` ends it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_fields

from piper.api.job import Job
from piper.api.program_file import program_from_json, program_to_json
from piper.api.starting import starting_weights
from piper.compiler.driver import (
    Asking,
    Lowered,
    Scheduled,
    Settings,
    expected_step,
    foresee,
    foresee_graph,
    lower,
    text_after,
)
from piper.compiler.loss_warnings import warn_of_loss
from piper.compiler.source import Source
from piper.compiler.stage_graphs import Stages
from piper.cost.estimate import NOMINAL
from piper.cost.machine import Machine
from piper.cost.machine_file import machine_of
from piper.directives.complete import complete
from piper.directives.schedule import Schedule
from piper.errors import (
    ArgumentError,
    Call,
    NoSuchAttribute,
    PlanError,
    TraceError,
    naming_arguments,
    naming_line,
    user_source,
)
from piper.files import PLAN_LIMIT, check_path, read_bytes, write_bytes
from piper.frontend.capture.capture import Step
from piper.frontend.capture.counted import CountedStep
from piper.frontend.cut.stage_choice import StageCut
from piper.frontend.refuse.refusals import call_of
from piper.frontend.refuse.trace_arguments import check_arguments
from piper.ir.form.byte_sizes import parse_size
from piper.ir.form.card import text_card
from piper.ir.form.graph_diff import graph_diff
from piper.ir.form.graph_text import graph_to_text
from piper.ir.form.screen import on_a_screen
from piper.ir.graph import Graph
from piper.ir.history import History, Record
from piper.ir.precisions import Precision, check_groups, precision_of
from piper.ir.tensor_type import Shapes
from piper.ir.well_formed import verify
from piper.no_collections import no_collections
from piper.observe.timeline import Timeline
from piper.passes.physical.buckets import Bucketed
from piper.passes.piece_sizes import piece_sizes
from piper.passes.preview import Foreseen, foreseen_in, preview_text
from piper.plan.optimizers import Optimizer
from piper.runtime.factory import Factory

if TYPE_CHECKING:
    from torch import nn

Strategy = Callable[[Schedule], None]
_WITH_MODEL = "piper.load_program(path, make_model, example_batch, step)"
MEANS = ("microbatch", "batch")  # what a mean loss is the mean of
_SGD = Optimizer("SGD", {"lr": 0.1})


@naming_arguments
@naming_line("trace")
def trace(
    make_model: Callable[[], nn.Module],
    example_batch: Any,
    step: Step,
    *,
    stages: str = "PP",
    mean: str = "microbatch",
) -> Program:
    """Capture one training step of a model, without memory for its weights.

    `example_batch` is a global batch; `step(model, batch)` returns a mean loss, or (sum, count).
    Untagged code joins a region of the tag `stages`. A mean loss is that of each microbatch, averaged;
    with `mean="batch"`, where it is a mean of `F.cross_entropy`, it is that of the whole batch, over all
    of its targets that are not `ignore_index`.
    """
    if mean not in MEANS:
        raise TraceError(f"mean={mean!r}", legal=" or ".join(f'"{each}"' for each in MEANS))
    check_arguments(make_model, example_batch, step)
    if mean == "batch":
        step = CountedStep(step)
    source = Source(make_model, example_batch, step, stages=stages)
    with no_collections():
        graph = source.graph()
    verify(graph)
    return Program(source, graph)


def load_program(
    path: str | os.PathLike[str],
    make_model: Callable[[], nn.Module] | None = None,
    example_batch: Any = None,
    step: Step | None = None,
    *,
    stages: str = "PP",
    mean: str = "microbatch",
) -> Program:
    """The program that `Program.save` wrote.

    With its model, batch and step, as `trace` takes them, it is traced and its directives are applied
    again; the graph must come out as saved. Without them it can be looked at, changed by directives,
    compared and exported, but not lowered.
    """
    check_path(path, "load_program")
    saved = program_from_json(read_bytes(path, limit=PLAN_LIMIT))
    if make_model is None or step is None:
        if make_model is not None or step is not None:
            raise PlanError("a model goes with its step", legal=_WITH_MODEL)
        return Program(None, saved.graph, saved.history)
    program = trace(make_model, example_batch, step, stages=stages, mean=mean)
    program = program.apply(saved.history) if saved.history else program
    difference = graph_diff(saved.graph, program.graph).splitlines()
    if difference:
        raise TraceError(
            f"{os.fspath(path)} is a program of another model, batch or step",
            details=difference[:6],
            legal="what it was traced from; or piper.trace(...).apply(loaded.history)",
        )
    return program


def _check_strategy(strategy: Any) -> None:
    """Raise unless it is a function of a Schedule, or a history."""
    legal = "a function of directives, def strategy(s): ..., or piper.strategies.parallel(dp=2)"
    if not callable(strategy):
        records = isinstance(strategy, Sequence) and not isinstance(strategy, str)
        if not records or not all(isinstance(each, Record) for each in strategy):
            raise ArgumentError(
                f"apply was given {strategy!r}", call=Call("apply", user_source()), legal=legal
            )
        return
    try:
        inspect.signature(strategy).bind(None)
    except TypeError:
        call = call_of(strategy)
        text = (
            f"{call.name}{inspect.signature(strategy)} is no strategy: apply calls it with s alone"
        )
        raise ArgumentError(text, call=call, legal=legal) from None
    except ValueError:
        pass  # its signature is not known


class Program:
    """A traced step under zero or more directives. Never changed: `apply` returns a new one."""

    def __init__(
        self,
        source: Source | None,
        graph: Graph,
        history: Sequence[Record] = (),
        stages: StageCut | None = None,
    ) -> None:
        self._source = source
        self.graph = graph
        self.history = History(history)
        self.stages = stages

    @property
    def source(self) -> Source:
        """The model, batch and step that it was traced from."""
        if self._source is None:
            raise PlanError(
                "this program was read from a file, without its model", legal=_WITH_MODEL
            )
        return self._source

    if not TYPE_CHECKING:  # a checker shall know of no other names

        def __getattr__(self, name: str) -> Any:
            """What a job has, a program has not yet."""
            text = f"a program has no {name!r}"
            if not name.startswith("_") and hasattr(Job, name):
                call = Call(f"program.{name}", user_source())
                raise NoSuchAttribute(
                    text, call=call, legal=f"program.lower(...).{name}: that of its job"
                )
            raise AttributeError(text)

    def apply(self, strategy: Strategy | Sequence[Record]) -> Program:
        """The program after all directives of a strategy, or of another program's history."""
        _check_strategy(strategy)
        stages = Stages(self._source, self.stages)
        schedule = Schedule(self.graph, self.history, stages=stages)
        with no_collections():
            if callable(strategy):
                returned: Any = strategy(schedule)
                if callable(returned):  # what directives return may be returned
                    raise ArgumentError(
                        f"the strategy returns a {type(returned).__name__}, which nobody applies",
                        call=call_of(strategy),
                        legal="directives on s alone; apply(parallel(dp=2)), or parallel(dp=2)(s) "
                        "inside of a strategy",
                    )
            else:
                for record in strategy:
                    schedule.composed = record.composed
                    schedule.apply(record.directive, call=record.call)
            graph = schedule.finish()
        return Program(self._source, graph, schedule.history, stages.cut)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph and the history as JSON, for `load_program`."""
        check_path(path, "program.save")
        write_bytes(path, self.to_json())

    def history_as_code(self) -> str:
        """The directives so far as a strategy that can be pasted."""
        return str(self.history)

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def __repr__(self) -> str:
        """Its graph and its directives, as far as they fit a screen."""
        num = len(self.history)
        head = f"Program of {num} directive{'' if num == 1 else 's'}: {self.graph.headline()}"
        lines = [head, *(f"  {record}" for record in self.history)]
        return on_a_screen(lines, more="program.history_as_code(), program.as_text()")

    def _repr_html_(self) -> str:
        """For notebooks: the same as a card."""
        return text_card(repr(self))

    def to_json(self) -> bytes:
        """The graph and the history, as `save` writes them."""
        return program_to_json(self.graph, self.history)

    def preview(self, *, clip: float | None = None) -> str:
        """The communication that each directive will cause, without any code; `clip` as in `lower`."""
        return preview_text(self.foreseen(clip=clip), self.history)

    def foreseen(self, *, clip: float | None = None) -> list[Foreseen]:
        """The same as data."""
        if self._source is None:
            return foreseen_in(self._foreseen_without_model(clip))
        return foreseen_in(foresee(self._scheduled, clip=clip))

    def text_after(
        self,
        last: str,
        *,
        device: str = "cpu",
        clip: float | None = None,
        machine: Machine | str | None = None,
    ) -> str:
        """The graph as it is after a pass of lowering: "bind", ..., "pace"."""
        grouping, frozen = self.source.grouping(_SGD)
        found = NOMINAL if machine is None else machine_of(machine)
        plain = Precision()
        settings = Settings(
            _SGD, grouping, frozen, device, 0, clip, False, None, plain, None, found
        )
        return text_after(self._scheduled, settings, last=last)

    def expected(
        self,
        *,
        device: str = "cpu",
        precision: Precision | str | None = None,
        clip: float | None = None,
        machine: Machine | str | None = None,
    ) -> Timeline:
        """A step as `lower` takes it to be when it puts tasks in order, on a `machine` or the nominal
        one: each task as long as it is alone, without gathers of parameters for each use. What the plan
        takes with all that goes on beside it, `piper simulate` says."""
        grouping, frozen = self.source.grouping(_SGD)
        found = NOMINAL if machine is None else machine_of(machine)
        # Its groups are those of an optimizer, of which there is none here.
        all_alike = replace_fields(precision_of(precision), groups={})
        settings = Settings(
            _SGD, grouping, frozen, device, 0, clip, False, None, all_alike, None, found
        )
        return expected_step(self._scheduled, settings)

    def _foreseen_without_model(self, clip: float | None) -> Graph:
        graph = self.graph if self.history else complete(self.graph, [])
        if piece_sizes(graph, overlap=False):
            raise PlanError("bucket_size cuts chunks, which takes the model", legal=_WITH_MODEL)
        return foresee_graph(graph, [record.call for record in self.history], clip=clip)

    def diff(self, other: Program) -> str:
        """What differs in the plan of another program; empty if nothing does.

        Of programs that were read without their model, what differs in their graphs.
        """
        if self._source is None or other._source is None:
            return graph_diff(self.graph, other.graph)
        return self.lower().diff(other.lower())

    @naming_arguments
    @naming_line("lower")
    def lower(
        self,
        *,
        optimizer: Optimizer | Factory | None = None,
        device: str = "cpu",
        seed: int = 0,
        clip: float | None = None,
        late_clip: bool = False,
        ema: float | None = None,
        precision: Precision | str | None = None,
        memory_limit: int | str | None = None,
        machine: Machine | str | None = None,
        weights: Any = None,
        strict: bool = True,
    ) -> Job:
        """Make the program physical: bodies, communication, order, events, and one plan per class.

        `optimizer` is a function of the list of parameters or, if its argument is called `model` or
        annotated as a module, of the model; it makes a `torch.optim` optimizer, or a list of them, with
        any groups. What it leaves out is not trained. Or it is `piper.adamw(...)` or `piper.sgd(...)`;
        without one it is SGD with a learning rate of 0.1.
        `seed` decides initial weights and dropout. `clip` is the largest norm that all gradients
        together may have: Updates wait for the norm or, with `late_clip`, start at once and are made
        again where it turns out too large. `math.inf` measures the norm and clips nothing.
        With `ema=0.999` ranks keep moving averages of the parameters that they step, as
        `AveragedModel` with `get_ema_multi_avg_fn(0.999)` does after each step: see `run.ema()`.
        `precision` says in which dtypes is computed and kept, by name or as a `piper.Precision`. With
        "bf16" parameters and floating-point tensors of the batch are bfloat16, with float32 masters that
        start from the model's own initial values; gradients are summed and reduced in float32. Operators
        compute as under torch's autocast on CUDA, on every device: products in bfloat16; losses, norms,
        softmax, sums and powers in float32, unless the code names a dtype; code under its own autocast
        as that says. A residual stream stays bfloat16: `x + f(x)` is bfloat16 where x is and f has
        products. "bf16-wire" reduces gradients in bfloat16, "bf16-pure" computes and keeps everything in
        it, without masters. "fp32", or none, leaves the model as it is written.
        A plan that needs more than `memory_limit` ("80GiB") on some rank is refused.
        Tasks are put in order by what they take on a `machine`: a Machine, the name of one ("h100") or a
        file that `piper profile` wrote; without one, on a nominal one.
        `weights` are what training starts from, instead of initial values: a state_dict, the path of a
        safetensors or torch.save file, or a folder with weights of Hugging Face's or torch's distributed
        kind. Each rank reads what it holds. Names must be those of the model; with `strict=False` what
        is missing starts from initial values, and a warning says what.
        """
        number = isinstance(clip, int | float) and not isinstance(clip, bool)
        if clip is not None and not (number and clip > 0):
            raise PlanError(
                f"clip={clip!r}",
                legal="a norm above 0, math.inf to measure it and clip nothing, or None",
            )
        clip = clip and min(clip, sys.float_info.max)  # JSON has no infinity
        if not isinstance(late_clip, bool):
            raise PlanError(f"late_clip={late_clip!r}", legal="True or False")
        if late_clip and clip is None:
            raise PlanError("late_clip without clip", legal="clip=1.0, late_clip=True")
        if ema is not None and not (isinstance(ema, int | float) and 0 <= ema < 1):
            raise PlanError(f"ema={ema!r}", legal="what a step keeps of averages, such as 0.999")
        chosen = _SGD if optimizer is None else optimizer
        grouping, frozen = self.source.grouping(chosen)
        limit = None if memory_limit is None else parse_size(memory_limit)
        numbers = precision_of(precision)
        check_groups(numbers, [g.names(place) for place, g in enumerate(grouping.groups)])
        found = NOMINAL if machine is None else machine_of(machine)
        settings = Settings(
            chosen, grouping, frozen, device, seed, clip, late_clip, ema, numbers, limit, found
        )
        stored, memory = None, None
        if weights is not None:
            stored, memory = starting_weights(self.source, weights, strict=strict)
        lowered = lower(self._scheduled, settings)
        warn_of_loss(lowered.source, lowered.plan)
        make = partial(self._variant, settings, lowered.buckets)

        def variants(training: bool, shapes: Shapes | None, asked: Asking | None = None) -> Job:
            return Job.of(make(training, shapes, asked), stored=stored, memory=memory)

        return Job.of(lowered, variants, stored=stored, memory=memory)

    def _variant(
        self,
        settings: Settings,
        buckets: Bucketed,
        training: bool,
        shapes: Shapes | None,
        asked: Asking | None,
    ) -> Lowered:
        """The same program with its parameters in the buckets of another one."""
        if not training:
            settings = replace(settings, clip=None, late_clip=False, ema=None)
        return lower(
            self._scheduled,
            settings,
            trained=buckets,
            training=training,
            shapes=shapes,
            asked=asked,
        )

    @property
    def _scheduled(self) -> Scheduled:
        return Scheduled(self.source, self.graph, tuple(self.history), self.stages)
