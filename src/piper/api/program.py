"""Program: a graph with the history of its directives; `trace` makes it, `lower` ends it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from piper.api.job import Job
from piper.api.source import Cuts, Source
from piper.api.stages import Stages
from piper.bodies.device import check_device
from piper.bodies.leaves import batch_constants
from piper.bodies.routed import Routing
from piper.check import check_plan
from piper.directives.complete import complete
from piper.directives.schedule import Rewrite, Schedule
from piper.errors import Call, PlanError
from piper.frontend.build import build_graph
from piper.frontend.capture import Step
from piper.frontend.program import Traced
from piper.frontend.stages import StageCut
from piper.ir.graph import Graph
from piper.ir.history import History, Record
from piper.ir.nodes import Chunk
from piper.ir.routing import ExpertForm
from piper.ir.serial import graph_to_json
from piper.ir.sizes import parse_size
from piper.ir.text import graph_to_text
from piper.ir.verify import verify
from piper.mesh import Mesh
from piper.passes.buckets import Bucketed
from piper.passes.emit import emit
from piper.passes.lower import data_axes, local_rows, lower_graph
from piper.passes.pieces import piece_sizes
from piper.passes.preview import Foreseen, foresee, preview_text
from piper.plan.body_spec import ChunkBodies
from piper.plan.types import Optimizer, Plan, RankClass
from piper.runtime.factory import Factory, resolve_optimizer

if TYPE_CHECKING:
    from torch import nn

Strategy = Callable[[Schedule], None]
_PRECISIONS = {None: "", "fp32": "", "bf16": "bfloat16"}  # what a model computes in
_OF_BACKWARDS = ("order", "recompute")


def trace(
    make_model: Callable[[], nn.Module], example_batch: Any, step: Step, *, stages: str = "PP"
) -> Program:
    """Capture one training step of a model, without memory for its weights.

    `example_batch` is a global batch; `step(model, batch)` returns a mean loss, or (sum, count).
    Untagged code joins a region of the tag `stages`.
    """
    source = Source(make_model, example_batch, step, stages=stages)
    _, traced = source.at(source.batch_size)
    graph = build_graph(traced)
    verify(graph)
    return Program(source, graph)


class Program:
    """A traced step under zero or more directives. Never changed: `apply` returns a new one."""

    def __init__(
        self,
        source: Source,
        graph: Graph,
        history: Sequence[Record] = (),
        rewrites: Sequence[Rewrite] = (),
        stages: StageCut | None = None,
    ) -> None:
        self.source = source
        self.graph = graph
        self.history = History(history)
        self.rewrites = tuple(rewrites)
        self.stages = stages

    def apply(self, strategy: Strategy) -> Program:
        """The program after all directives of a strategy."""
        stages = Stages(self.source, self.stages)
        schedule = Schedule(self.graph, self.history, self.rewrites, stages=stages)
        strategy(schedule)
        graph = schedule.finish()
        return Program(self.source, graph, schedule.history, schedule.rewrites, stages.cut)

    def history_as_code(self) -> str:
        """The directives so far as a strategy that can be pasted."""
        return str(self.history)

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def to_json(self) -> bytes:
        return graph_to_json(self.graph)

    def preview(self) -> str:
        """The communication that each directive will cause, without lowering anything."""
        return preview_text(self.foreseen(), self.history)

    def foreseen(self) -> list[Foreseen]:
        """The same as data."""
        graph, traced = self._refined(self.source)
        specs = {name: value.spec for name, value in traced.values.items()}
        calls = [record.call for record in self.history]
        return foresee(graph, specs, calls, data_axes=data_axes(graph))

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
        settings = _Settings(chosen, device, seed, clip, late_clip, _PRECISIONS[precision], limit)
        with _no_collections():
            return self._lower(settings)

    def _refined(self, source: Source) -> tuple[Graph, Traced]:
        """The graph in chunks as fine as its directives ask for, with its code for one rank.

        The directives are replayed on the finer graph, or on that of another variant of the program:
        they name tags, which all pieces have. Those about backwards mean nothing to an evaluation.
        """
        # `apply` has completed the graph; without any strategy all runs on one device.
        logical = self.graph if self.history else complete(self.graph, [])
        calls = [record.call for record in self.history]
        rows = local_rows(logical, self.source.batch_size, calls)
        cuts = Cuts(tuple(sorted(piece_sizes(logical).items())), self.stages)
        if cuts.pieces or source is not self.source:
            _, traced = source.at(source.batch_size, cuts)
            logical = build_graph(traced)
            for call, rewrite in zip(calls, self.rewrites, strict=True):
                if source.training or call.name not in _OF_BACKWARDS:
                    logical = rewrite(logical)
            logical = complete(logical, calls)
        return logical, source.local(rows, cuts)

    def _lower(self, settings: _Settings, trained: Bucketed | None = None) -> Job:
        """The job of training or, with the buckets that training has made, of evaluation."""
        device = settings.device
        check_device(device)
        source = self.source.variant(
            dtype=settings.dtype, training=trained is None, cut=self.stages
        )
        logical, traced = self._refined(source)
        calls: list[Call] = [record.call for record in self.history]
        flops: dict[str, float] = {}

        def bodies(node: Chunk, form: ExpertForm | None, size: int) -> ChunkBodies:
            routing = Routing(size, form.counts, form.rows) if form else None
            code = traced.chunks[node.chunk].code
            found = source.bodies.chunk(
                code, device=device, routing=routing, recompute=node.recompute
            )
            flops.update((body.hash, body.flops) for body in found.by_phase.values())
            return found

        specs = {name: value.spec for name, value in traced.values.items()}
        graph, bucketed = lower_graph(
            logical,
            bodies=bodies,
            specs=specs,
            flops=flops,
            calls=calls,
            device=device,
            clip=settings.clip,
            late=settings.late_clip,
            optimizer=settings.optimizer,
            trained=trained,
        )
        classes, streams, groups = emit(graph, bucketed)
        tensors = {
            name: msgspec.structs.replace(tensor, trainable=bucketed.trains(name))
            for name, tensor in source.tensors.items()
        }
        used = {task.body for found in classes for task in found.tasks if task.body}
        used |= {tensor.init for tensor in tensors.values()}
        plan = Plan(
            mesh=logical.mesh,
            streams=streams,
            groups=groups,
            classes=classes,
            tensors=tensors,
            batch=source.batch_specs,
            batch_constants=batch_constants(source.batch),
            data_axes=data_axes(logical),
            num_microbatches=logical.num_microbatches,
            optimizer=settings.optimizer,
            seed=settings.seed,
            device=device,
            clip=settings.clip,
            bodies=tuple(sorted(used)),
            buckets=bucketed.buckets,
            history=tuple(self.history),
            train=trained is None,
            flops=_model_flops(logical.mesh, classes, flops, training=trained is None),
        )
        report = check_plan(plan, memory_limit=settings.memory_limit)
        texts = {name: source.bodies.texts[name] for name in plan.bodies}
        evaluation = partial(self._evaluation, settings, bucketed) if trained is None else None
        return Job(source, graph, plan, texts, report, evaluation)

    def _evaluation(self, settings: _Settings, bucketed: Bucketed) -> Job:
        with _no_collections():
            return self._lower(replace(settings, clip=None, late_clip=False), bucketed)


@dataclass(frozen=True)
class _Settings:
    """What `lower` was asked for."""

    optimizer: Optimizer
    device: str
    seed: int
    clip: float | None
    late_clip: bool
    dtype: str
    memory_limit: int | None


def _model_flops(
    mesh: Mesh, classes: Sequence[RankClass], flops: Mapping[str, float], *, training: bool
) -> float:
    """Of a step over all ranks: a backward has twice those of its forward; recomputing adds none."""
    forward = 0.0
    for found in classes:
        ranks = mesh.size_of(mesh.free(found.slice))
        bodies = (task.body for task in found.tasks if task.kind == "run" and task.phase == "F")
        forward += ranks * sum(flops.get(body, 0.0) for body in bodies)
    return 3 * forward if training else forward


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Passes make many small objects and no cycles; looking for some would double their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
