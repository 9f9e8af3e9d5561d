"""The driver: a traced program under its directives in; graph, plan, bodies and proof out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from piper.bodies.cutting.routed import Routing
from piper.bodies.device import check_device
from piper.bodies.leaves import batch_constants
from piper.check import Report, check_plan
from piper.compiler.again_cuts import again_cuts
from piper.compiler.cadence_choice import choose_cadences, remaking
from piper.compiler.fit import fit_types
from piper.compiler.source import Cuts, Source
from piper.compiler.state_limits import check_state
from piper.compiler.tensor_cuts import tensor_cuts
from piper.cost.estimate import NOMINAL
from piper.cost.machine import Machine
from piper.directives.complete import complete
from piper.directives.replay_history import replay_history
from piper.errors import Call, TraceError
from piper.frontend.capture.step_results import PredictStep
from piper.frontend.cut.stage_choice import StageCut
from piper.frontend.refuse.refusals import call_of
from piper.frontend.traced import Traced
from piper.ir.form.graph_text import graph_to_text
from piper.ir.graph import Graph
from piper.ir.history import Record
from piper.ir.layouts import Split
from piper.ir.nodes import Chunk
from piper.ir.precisions import Precision
from piper.ir.routing import ExpertForm
from piper.ir.tensor_type import Shapes, shapes_text
from piper.mesh import Mesh
from piper.no_collections import no_collections
from piper.observe.timeline import Timeline
from piper.passes.dispatch.expected_times import expected_timeline
from piper.passes.early_counts import early_counts
from piper.passes.foresight import foreseen_bodies
from piper.passes.lower import Lowering, data_axes, local_rows, run_passes
from piper.passes.physical.bind import GetBodies
from piper.passes.physical.buckets import Bucketed
from piper.passes.physical.weight_halves import weights_beside
from piper.passes.piece_sizes import piece_sizes
from piper.plan.body_moments import Moments, larger, shortened
from piper.plan.body_spec import BodySpec, ChunkBodies
from piper.plan.cadence import Cadence
from piper.plan.optimizers import Grouping
from piper.plan.tasks import Calling, Run
from piper.plan.types import Plan, RankClass


@dataclass(frozen=True)
class Scheduled:
    """A program after its directives: its source, its logical graph, and what was done to it."""

    source: Source
    graph: Graph
    history: tuple[Record, ...]
    stages: StageCut | None

    @property
    def calls(self) -> list[Call]:
        return [record.call for record in self.history]


@dataclass(frozen=True)
class Settings:
    """What `lower` was asked for.

    `grouping` is what `optimizer` makes of the model's parameters; `frozen` are those that a gradient
    reaches, but no optimizer steps.
    """

    optimizer: Any
    grouping: Grouping
    frozen: frozenset[str]
    device: str
    seed: int
    clip: float | None
    late_clip: bool
    ema: float | None
    precision: Precision
    memory_limit: int | None
    machine: Machine = NOMINAL


@dataclass(frozen=True)
class Asking:
    """What a model is asked for: the predictions of a function, on batches like this one."""

    predict: PredictStep
    batch: Any


@dataclass(frozen=True)
class Lowered:
    """All that lowering makes. `buckets` are for an evaluation and for batches of other shapes, whose
    plans keep parameters alike."""

    source: Source
    graph: Graph
    plan: Plan
    bodies: Mapping[str, str]
    report: Report
    buckets: Bucketed
    optimizer: Any  # as the user gave it
    seconds: Mapping[str, float]  # what each pass took


def refine(scheduled: Scheduled, source: Source) -> tuple[Graph, Traced]:
    """The graph in chunks as fine as its directives ask for, with its code for one rank.

    The directives are replayed on the finer graph, or on that of another variant of the program:
    they name tags, which all pieces have. Those about backwards mean nothing to an evaluation.
    """
    # `apply` has completed the graph; without any strategy all runs on one device.
    logical = scheduled.graph if scheduled.history else complete(scheduled.graph, [])
    calls = scheduled.calls
    rows = local_rows(logical, source.batch_size, calls)
    sizes, counts = piece_sizes(logical, dtype=source.dtype), early_counts(logical)
    tensors = tensor_cuts(logical, scheduled.history)
    stages = scheduled.stages.tag if scheduled.stages else source.stages
    around = again_cuts(logical, stages, tensors=bool(tensors))
    pieces = tuple(sorted(sizes.items()))
    cuts = Cuts(pieces, scheduled.stages, tuple(sorted(counts)), tensors, *around)
    local = source.local(rows, cuts)
    if cuts.finer or source is not scheduled.source or source.guessed:
        logical = source.graph(cuts, like=local if rows != source.batch_size else None)
        logical = replay_history(logical, scheduled.history, training=source.training)
    _, whole = source.at(source.batch_size, cuts)
    return weights_beside(fit_types(logical, whole, local)), local


def foresee(scheduled: Scheduled, *, clip: float | None = None) -> Graph:
    """The physical graph as far as it can be known without bodies: its Comms are those of lowering, but
    gathers of parameters, which are at most so many."""
    logical, _ = refine(scheduled, scheduled.source)
    return foresee_graph(logical, scheduled.calls, clip=clip)


def foresee_graph(logical: Graph, calls: Sequence[Call], *, clip: float | None = None) -> Graph:
    """The same of a complete logical graph, whose chunks are as fine as its directives ask for."""
    bodies = foreseen_bodies(logical)
    state = Lowering(logical, bodies, {}, calls, clip=clip)
    with no_collections():
        return run_passes(state, last="pace").graph


def lower(
    scheduled: Scheduled,
    settings: Settings,
    *,
    trained: Bucketed | None = None,
    training: bool = True,
    shapes: Shapes | None = None,
    asked: Asking | None = None,
) -> Lowered:
    """The plan of training or, without `training`, of evaluation, on batches like the example batch or
    of other `shapes`; or of what is `asked`. It keeps parameters in the buckets `trained` that the first
    plan has made."""
    with no_collections():
        return _lower(scheduled, settings, trained, training, shapes, asked)


def text_after(scheduled: Scheduled, settings: Settings, *, last: str) -> str:
    """The graph as it is after a pass."""
    with no_collections():
        _, state, _ = _started(scheduled, settings, None, None)
        return graph_to_text(run_passes(state, last=last).graph)


def expected_step(scheduled: Scheduled, settings: Settings) -> Timeline:
    """A step as list scheduling takes it to be when it puts tasks in order."""
    with no_collections():
        _, state, _ = _started(scheduled, settings, None, None)
        ordered = run_passes(state, last="schedule").ordered
    assert ordered is not None
    return expected_timeline(ordered, [str(record) for record in scheduled.history])


@dataclass
class Asked:
    """What is known of the bodies that were asked for: their operations, how memory passes inside of
    them, and which of their results are products; and what is gathered for operators of the code."""

    flops: dict[str, float] = field(default_factory=dict)
    inside: dict[str, Moments] = field(default_factory=dict)
    products: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()

    def add(self, body: BodySpec) -> None:
        self.flops[body.hash] = body.flops
        # Rows that depend on data are not in a body's name.
        self.inside[body.hash] = larger(body.inside, self.inside.get(body.hash, body.inside))
        self.products[body.hash] = body.products


def bodies_on(
    device: str, source: Source, logical: Graph, traced: Traced
) -> tuple[GetBodies, Asked]:
    """The bodies of a graph's chunks on demand; and what is known of those that were asked for."""
    data_ranks = logical.mesh.size_of(data_axes(logical))
    asked = Asked(gathered=traced.gathered)

    def bodies(node: Chunk, form: ExpertForm | None, size: int) -> ChunkBodies:
        load = max((owner.max_load for owner in node.owners), default=1.0)
        routing = Routing(size, form.counts, form.rows, load) if form else None
        code = traced.chunks[node.chunk].code
        chunk_bodies = source.bodies.chunk(
            code,
            device=device,
            routing=routing,
            recompute="nothing" if node.again == "pieces" else node.again,
            data_ranks=data_ranks,
        )
        for body in chunk_bodies.by_phase.values():
            asked.add(body)
        return chunk_bodies

    return bodies, asked


def _started(
    scheduled: Scheduled,
    settings: Settings,
    evaluated: Bucketed | None,
    shapes: Shapes | None,
    asking: Asking | None = None,
) -> tuple[Source, Lowering, Asked]:
    """All that passes need: the graph in its final chunks, and its bodies on demand; and what is known
    of those that were asked for."""
    device = settings.device
    check_device(device)
    begin = time.perf_counter()
    numbers: dict[str, Any] = {
        "dtype": settings.precision.compute,
        "float32_operators": settings.precision.widens,
        "frozen": settings.frozen,
        "cut": scheduled.stages,
    }
    if asking is None:
        training = evaluated is None
        source = scheduled.source.variant(training=training, shapes=shapes, **numbers)
    else:
        source = scheduled.source.predicting(asking.predict, asking.batch, **numbers)
        scheduled = _among(scheduled, source)
    logical, traced = refine(scheduled, source)
    if asking is not None:
        _check_rows(logical, asking)
    check_state(logical, traced, scheduled.calls)
    bodies, asked = bodies_on(device, source, logical, traced)
    state = Lowering(
        logical,
        bodies,
        asked.flops,
        scheduled.calls,
        device=device,
        clip=settings.clip,
        late=settings.late_clip,
        grouping=settings.grouping,
        precision=settings.precision,
        trained=evaluated,
        machine=settings.machine,
    )
    state.seconds["refine"] = time.perf_counter() - begin
    return source, state, asked


def _lower(
    scheduled: Scheduled,
    settings: Settings,
    trained: Bucketed | None,
    training: bool,
    shapes: Shapes | None,
    asking: Asking | None = None,
) -> Lowered:
    evaluated = None if training else trained
    source, started, asked = _started(scheduled, settings, evaluated, shapes, asking)
    limit = settings.memory_limit
    made: dict[tuple[Cadence, ...], tuple[Lowering, Plan]] = {}

    def attempt(cadences: tuple[Cadence, ...]) -> Plan:
        logical = remaking(started.logical, cadences) if training else started.logical
        state = replace(started, logical=logical, cadences=cadences, seconds=dict(started.seconds))
        plan = _plan(scheduled, settings, source, run_passes(state), asked, trained, training)
        made[cadences] = state, plan
        return plan

    if trained is not None:
        attempt(chosen := trained.cadences)
    else:
        chosen = choose_cadences(
            started.logical, settings.precision, settings.machine, limit, attempt
        )
    state, plan = made[chosen]
    begin = time.perf_counter()
    report = check_plan(plan, memory_limit=limit)
    state.seconds["prove"] = time.perf_counter() - begin
    texts = {name: source.bodies.texts[name] for name in plan.bodies}
    optimizer, graph = settings.optimizer, state.graph
    return Lowered(source, graph, plan, texts, report, state.bucketed, optimizer, state.seconds)


def _plan(
    scheduled: Scheduled,
    settings: Settings,
    source: Source,
    state: Lowering,
    asked: Asked,
    trained: Bucketed | None,
    training: bool,
) -> Plan:
    """What the passes have made, as one record."""
    logical, bucketed, classes = state.logical, state.bucketed, state.classes
    if trained is not None and bucketed != trained:
        raise TraceError(
            f"the model trains other parameters for {shapes_text(source.shapes)} than for the "
            "example batch",
            legal="code that reads the same parameters whatever the batch's shape",
        )
    tensors = {
        name: msgspec.structs.replace(
            tensor, trainable=bucketed.trains(name), cut=_cut(logical, name)
        )
        for name, tensor in source.tensors.items()
    }
    used = {t.body for rank_class in classes for t in rank_class.tasks if isinstance(t, Calling)}
    used |= {tensor.init for tensor in tensors.values()}
    return Plan(
        mesh=logical.mesh,
        streams=state.streams,
        groups=state.groups,
        classes=classes,
        tensors=tensors,
        batch=source.batch_specs,
        batch_constants=batch_constants(source.batch),
        data_axes=data_axes(logical),
        num_microbatches=logical.num_microbatches,
        param_groups=settings.grouping.groups,
        seed=settings.seed,
        device=settings.device,
        clip=settings.clip,
        ema=settings.ema,
        precision=settings.precision,
        bodies=tuple(sorted(used)),
        buckets=bucketed.buckets,
        history=scheduled.history,
        cadences=bucketed.cadences,
        train=training,
        flops=_model_flops(logical.mesh, classes, state.flops, training=training),
        body_flops={name: state.flops[name] for name in sorted(used) if state.flops.get(name)},
        inside={
            name: short for name in sorted(used) if (short := shortened(asked.inside.get(name, ())))
        },
        products={name: found for name in sorted(used) if (found := asked.products.get(name))},
        state_names=source.state_names,
        gathered=asked.gathered,
    )


def _among(scheduled: Scheduled, source: Source) -> Scheduled:
    """Directives that name leaves of the batch, for code that reads fewer."""
    _, traced = source.at(source.batch_size)
    read = (name for name, value in traced.values.items() if value.role == "batch")
    leaves = {name.removeprefix("batch:") for name in read}
    records = (
        msgspec.structs.replace(record, directive=record.directive.among(leaves))
        for record in scheduled.history
    )
    return replace(scheduled, history=tuple(records))


def _check_rows(logical: Graph, asking: Asking) -> None:
    """Raise unless predictions have a row for each sample, so that they can be put together."""
    for value in logical.values.values():
        if value.role == "prediction" and value.batch != Split(0):
            raise TraceError(
                f"predict returns {value.type}, whose dim 0 does not have a row for each sample",
                call=call_of(asking.predict),
                legal="tensors with samples in dim 0; means are metrics of step, for run.evaluate",
            )


def _cut(logical: Graph, name: str) -> tuple[tuple[str, Split], ...]:
    """The axes that cut a tensor of the model, and how."""
    value = logical.values.get(name)
    layout = value.layout if value is not None else ()
    ways = ((axis, way) for axis, way in layout if isinstance(way, Split))
    return tuple((axis, way) for axis, way in ways if way.dim is not None)


def _model_flops(
    mesh: Mesh, classes: Sequence[RankClass], flops: Mapping[str, float], *, training: bool
) -> float:
    """Of a step over all ranks: a backward has twice those of its forward; recomputing adds none."""
    forward = 0.0
    for rank_class in classes:
        ranks = mesh.size_of(mesh.free(rank_class.slice))
        runs = (task for task in rank_class.tasks if isinstance(task, Run) and task.phase == "F")
        forward += ranks * sum(flops.get(task.body, 0.0) for task in runs)
    return 3 * forward if training else forward
