"""Program: a graph with the history of its directives; `trace` makes it, `lower` ends it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from piper.api.job import Job
from piper.api.source import Source
from piper.bodies.device import check_device
from piper.bodies.leaves import batch_constants
from piper.bodies.routed import Routing
from piper.directives.schedule import Schedule
from piper.errors import Call, PlanError
from piper.frontend.build import build_graph
from piper.frontend.capture import Step
from piper.ir.graph import Graph
from piper.ir.history import History, Record
from piper.ir.nodes import Chunk
from piper.ir.routing import ExpertForm
from piper.ir.serial import graph_to_json
from piper.ir.text import graph_to_text
from piper.ir.verify import verify
from piper.passes.emit import emit
from piper.passes.lower import data_axes, local_rows, lower_graph
from piper.passes.preview import foresee, preview_text
from piper.plan.body_spec import ChunkBodies
from piper.plan.types import BatchLeaf, Optimizer, Plan

if TYPE_CHECKING:
    from torch import nn

Strategy = Callable[[Schedule], None]


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

    def __init__(self, source: Source, graph: Graph, history: Sequence[Record] = ()) -> None:
        self.source = source
        self.graph = graph
        self.history = History(history)

    def apply(self, strategy: Strategy) -> Program:
        """The program after all directives of a strategy."""
        schedule = Schedule(self.graph, self.history)
        strategy(schedule)
        return Program(self.source, schedule.finish(), schedule.history)

    def history_as_code(self) -> str:
        """The directives so far as a strategy that can be pasted."""
        return str(self.history)

    def as_text(self) -> str:
        return graph_to_text(self.graph)

    def to_json(self) -> bytes:
        return graph_to_json(self.graph)

    def preview(self) -> str:
        """The communication that each directive will cause, without lowering anything."""
        graph = Schedule(self.graph, self.history).finish()
        rows = local_rows(graph, self.source.batch_size, [r.call for r in self.history])
        traced = self.source.local(rows)
        specs = {name: value.spec for name, value in traced.values.items()}
        return preview_text(foresee(graph, specs, data_axes=data_axes(graph)), self.history)

    def diff(self, other: Program) -> str:
        """What differs in the plan of another program; empty if nothing does."""
        return self.lower().diff(other.lower())

    def lower(
        self, *, optimizer: Optimizer | None = None, device: str = "cpu", seed: int = 0
    ) -> Job:
        """Make the program physical: bodies, communication, order, events, and one plan per class.

        Without an optimizer it is SGD with a learning rate of 0.1. `seed` decides initial weights.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise PlanError(
                f"optimizer is {optimizer!r}", legal="piper.adamw(lr=...) or piper.sgd(lr=...)"
            )
        with _no_collections():
            return self._lower(optimizer or Optimizer("SGD", {"lr": 0.1}), device, seed)

    def _lower(self, optimizer: Optimizer, device: str, seed: int) -> Job:
        check_device(device)
        logical = Schedule(self.graph, self.history).finish()
        calls: list[Call] = [record.call for record in self.history]
        rows = local_rows(logical, self.source.batch_size, calls)
        traced = self.source.local(rows)
        flops: dict[str, float] = {}

        def bodies(node: Chunk, form: ExpertForm | None, size: int) -> ChunkBodies:
            routing = Routing(size, form.counts, form.rows) if form else None
            code = traced.chunks[node.chunk].code
            found = self.source.bodies.chunk(code, device=device, routing=routing)
            for body in (found.forward, found.backward):
                if body is not None:
                    flops[body.hash] = body.flops
            return found

        specs = {name: value.spec for name, value in traced.values.items()}
        graph = lower_graph(logical, bodies=bodies, specs=specs, flops=flops, calls=calls)
        classes, streams, groups = emit(graph)
        tensors = self.source.tensors
        used = {task.body for found in classes for task in found.tasks if task.body}
        used |= {tensor.init for tensor in tensors.values()}
        leaves = {
            name: BatchLeaf(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            for name, leaf in self.source.leaves.items()
        }
        plan = Plan(
            mesh=logical.mesh,
            streams=streams,
            groups=groups,
            classes=classes,
            tensors=tensors,
            batch=leaves,
            batch_constants=batch_constants(self.source.batch),
            data_axes=data_axes(logical),
            num_microbatches=logical.num_microbatches,
            optimizer=optimizer,
            seed=seed,
            device=device,
            bodies=tuple(sorted(used)),
            history=tuple(self.history),
        )
        texts = {name: self.source.bodies.texts[name] for name in plan.bodies}
        return Job(self.source, graph, plan, texts)


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
