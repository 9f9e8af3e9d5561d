"""Capture: the user's model and step in, one flat FX graph with the source of every input out."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, fx, nn
from torch._dynamo import exc
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from piper.bodies.captured_nodes import callee, plain_code, source_of, value_of
from piper.bodies.closed_operator import steps_of
from piper.bodies.flex_math import flex_on_cpu
from piper.bodies.initial import Initializers, recording
from piper.bodies.leaves import batch_leaves, map_leaves, tensors_in
from piper.errors import Call, Source, TraceError, user_source
from piper.frontend.annotate import counting_regions
from piper.frontend.capture.any_rows import (
    RowSymbol,
    depends_on_data,
    leave_rows_open,
    without_row_inputs,
)
from piper.frontend.capture.autocast_marks import mark_casts
from piper.frontend.capture.building import building, cast_parameters
from piper.frontend.capture.checkpointed_code import inline_checkpoints
from piper.frontend.capture.counted import CountedStep, count_targets, uncounted
from piper.frontend.capture.dynamo_settings import tracing_settings
from piper.frontend.capture.fixed_shapes import fixed_shapes
from piper.frontend.capture.flex_attention import (
    lower_flex_attention,
    refuse_unknown_masks,
    unknown_blocks,
)
from piper.frontend.capture.float32_operators import widen_operators
from piper.frontend.capture.grad_modes import remove_grad_modes
from piper.frontend.capture.hf_experts import grouped_experts
from piper.frontend.capture.hf_outputs import install_output_hooks
from piper.frontend.capture.inner_graphs import close_operators, inner_graphs
from piper.frontend.capture.interpret import Facts, interpret
from piper.frontend.capture.layer_drop import certain_layers
from piper.frontend.capture.lifted import LiftedStep, as_traced, lift
from piper.frontend.capture.mode_reads import only_mode_changes, watching_mode_reads
from piper.frontend.capture.replaced_buffers import noting_replacements, store_replacements
from piper.frontend.capture.state_parts import StatePart, changed_buffers, mark_state, take_state
from piper.frontend.capture.statistics import separate_statistics
from piper.frontend.capture.step_results import (
    PredictStep,
    WholePrediction,
    WholeStep,
    results_of,
)
from piper.frontend.refuse.hooks import refuse_hooks, refusing_hooks
from piper.frontend.refuse.loop_code import refuse_collectives, refusing_wrappers
from piper.frontend.refuse.odd_parameters import refuse_sparse_gradients, refusing_lazy
from piper.frontend.refuse.plain_tensors import refuse_plain_tensor
from piper.frontend.refuse.refusals import (
    readable_building,
    readable_errors,
    warn_of_side_effects,
)
from piper.frontend.refuse.side_effects import TracedEffects, watching_side_effects
from piper.frontend.refuse.state import Origin, refuse_changed_state
from piper.frontend.refuse.transforms import refuse_transforms
from piper.ir.tensor_type import TensorType

Step = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Capture:
    """The whole step as one graph, for one batch shape."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    origins: dict[fx.Node, Origin]
    model: nn.Module
    made: dict[str, Tensor]  # parameters and buffers as make_model made them
    initializers: Initializers = field(repr=False)
    facts: Facts = field(repr=False)
    state: tuple[StatePart, ...]  # what gives buffers their next content
    loss: fx.Node
    count: fx.Node | None
    metrics: Mapping[str, fx.Node]
    predictions: Mapping[str, fx.Node]
    any_mode: bool  # whether it is the same in train() and eval() mode

    def without_gradient(self) -> Capture:
        """The same where nothing is differentiated."""
        return replace(self, facts=replace(self.facts, flowing=set()))


_REFUSALS = (exc.TorchDynamoException, exc.UserError)


@dataclass(frozen=True)
class Recording:
    """A step as Dynamo has seen it, before anything is known of its nodes.

    `rows` says for which numbers of samples it was the same; without it, for that of its `inputs`.
    `any_mode` says that it was the same in eval() mode.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    origins: dict[fx.Node, Origin]
    inputs: Sequence[Tensor]
    model: nn.Module
    made: dict[str, Tensor]
    initializers: Initializers
    effects: TracedEffects
    training: bool
    rows: RowSymbol | None
    any_mode: bool

    def holds_at(self, rows: int) -> bool:
        return self.rows is None or self.rows.covers(rows)

    def types_at(self, rows: int) -> dict[str, TensorType]:
        """The types of all results at a number of rows, by the names that Values have."""
        assert self.rows is not None
        types = {}
        for node in self.graph.nodes:
            value = value_of(node)
            if isinstance(value, Tensor):
                origin = self.origins.get(node)
                name = origin.name if origin else f"%{node.name}"
                dtype = str(value.dtype).removeprefix("torch.")
                types[name] = TensorType(self.rows.shape(value, rows), dtype)
        return types


@torch.enable_grad()  # a run may compile where its user evaluates, under no_grad
def record(
    make_model: Callable[[], nn.Module],
    batch: Any,
    step: Step,
    *,
    rows: int,
    any_rows: bool,
    dtype: str = "",
    float32_operators: bool = False,
    training: bool = True,
    frozen: frozenset[str] = frozenset(),
    autocast: bool = False,
) -> Recording:
    """Record `step` on a batch like `batch` with `rows` samples; no memory is taken for weights.

    With `any_rows` it holds for other numbers too, where the code allows it. With `dtype`, parameters
    and the batch's floating-point tensors have it; with `float32_operators` losses, norms and the like
    compute in float32 all the same; with `autocast`, products may meet tensors of several dtypes while
    the step is recorded. Without `training` the model is in eval() mode; `frozen` parameters
    get no gradient.
    """
    torch._dynamo.reset()
    mode = FakeTensorMode()
    # Copies of a model's tensors stay in the mode instead of taking a copy of it along.
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]
    with (
        _quiet(),
        mode,
        building(mode),
        refusing_hooks(),
        refusing_lazy(),
        refusing_wrappers(),
        recording() as initializers,
        readable_building(),
    ):
        model = make_model()
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"make_model returns {type(model).__name__}",
            call=Call("trace", user_source()),
            legal="a function that returns an nn.Module",
        )
    refuse_hooks(model)
    named = (*model.named_parameters(), *model.named_buffers())
    with mode:
        fake_batch = map_leaves(lambda leaf: _fake_leaf(leaf, rows, dtype), batch)
        if dtype:
            cast_parameters(model, getattr(torch, dtype))
    for name, param in model.named_parameters():
        if plain_name(name) in frozen:
            param.requires_grad_(False)
    if not training:
        model.eval()
    for name, tensor in named:
        if not isinstance(tensor, FakeTensor):
            raise TraceError(
                f"{name} is not made inside make_model",
                legal="create parameters and buffers in the function given to trace",
            )
    modes_alike = training and only_mode_changes(model)
    if any_rows:
        leave_rows_open(batch_leaves(fake_batch).values())
    install_output_hooks(model)
    with (
        _quiet() as said,
        as_traced(step) as traced_step,
        watching_side_effects() as effects,
        noting_replacements(),
        watching_mode_reads() as mode_reads,
        grouped_experts(model),
        certain_layers(model),
        fixed_shapes(),
        flex_on_cpu(),
        unknown_blocks(),
        tracing_settings(),
        torch.autocast("cpu", getattr(torch, dtype)) if autocast else contextlib.nullcontext(),
        counting_regions(),
        torch.fx.traceback.preserve_node_meta(),
        readable_errors(_REFUSALS, step, fake_batch),
    ):
        counted = isinstance(traced_step, CountedStep)
        whole: nn.Module = WholeStep(model, uncounted(traced_step))
        if isinstance(traced_step, PredictStep):
            whole = WholePrediction(model, traced_step)
        module = dynamo_graph_capture_for_export(whole)(fake_batch)
        flat = module._dynamo_bytecode_flatten(fake_batch)
    warn_of_side_effects(said, effects)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    inline_checkpoints(graph, module)
    flat = lower_flex_attention(graph, flat)
    for each in (graph, *inner_graphs(module)):
        refuse_transforms(each)
        refuse_collectives(each)
        refuse_sparse_gradients(each)
    for inner in inner_graphs(module):
        _refuse_data_dependent(inner)
        if isinstance(step, LiftedStep):
            lift(inner)
    constants = close_operators(graph, module)
    store_replacements(graph)
    if isinstance(step, LiftedStep):
        lift(graph)
    if counted:
        count_targets(graph)
    mark_casts(graph)
    remove_grad_modes(graph)
    _refuse_data_dependent(graph)
    separate_statistics(graph)
    flat = without_row_inputs(graph, flat)
    origins = _origins(graph, flat, _tensor_names(model, fake_batch), model)
    leaves = [value_of(node) for node, origin in origins.items() if origin.role == "batch"]
    made = {plain_name(name): tensor for name, tensor in named}
    symbol = RowSymbol(leaves, recorded_at=rows) if any_rows else None
    recorded = Recording(
        graph,
        constants,
        origins,
        flat,
        model,
        made,
        initializers,
        effects,
        training,
        symbol,
        any_mode=modes_alike and not mode_reads,
    )
    if dtype and float32_operators:
        narrow, inputs = getattr(torch, dtype), _fresh_inputs(recorded, rows)
        with _quiet():
            widen_operators(graph, constants, inputs, narrow=narrow, model=model)
    return recorded


@torch.enable_grad()
def finish(recording: Recording, rows: int) -> Capture:
    """The recorded step for batches of `rows` samples, with all that is known of its nodes."""
    open_rows = recording.rows is not None
    with _quiet():
        inputs = _fresh_inputs(recording, rows) if open_rows else recording.inputs
        graph, copies, facts = interpret(
            recording.graph, recording.constants, inputs, open_rows=open_rows
        )
    origins = {copies[node]: origin for node, origin in recording.origins.items()}
    results = results_of(graph)
    loss, count = results.loss, results.count
    state: tuple[StatePart, ...] = ()
    buffers = changed_buffers(origins, facts) if recording.training else []
    refuse_changed_state(origins, facts, recording.model, kept=buffers)
    if buffers:
        state = take_state(graph, buffers, facts, results.all)
        with _quiet():  # on inputs that no run has touched
            inputs = _fresh_inputs(recording, rows)
            graph, _, facts = interpret(graph, recording.constants, inputs, open_rows=False)
        mark_state(graph, facts, results.all)
    recording.effects.refuse()
    if loss not in facts.flowing and not results.predictions:
        source = source_of(loss)
        raise TraceError(
            f"the loss{f' ({source})' if source else ''} does not depend on any parameter that requires "
            "a gradient",
            legal="a loss made of the model's results, without .detach(), .item() or torch.no_grad()",
        )
    if count is not None:
        _refuse_counted_parameters(count, origins, facts)
    _drop_dead_code(graph, facts, [node for part in state for node in part.given])
    refuse_unknown_masks([graph, *(part.graph for part in state)])
    capture = Capture(
        graph=graph,
        constants=recording.constants,
        origins=origins,
        model=recording.model,
        made=recording.made,
        initializers=recording.initializers,
        facts=facts,
        state=state,
        loss=loss,
        count=count,
        metrics=results.metrics,
        predictions=results.predictions,
        any_mode=recording.any_mode and not state,
    )
    return capture if recording.training else capture.without_gradient()


def _fresh_inputs(recording: Recording, rows: int) -> list[Tensor]:
    """Inputs of one size, without the history that a run before may have given them."""
    mode = next(tensor.fake_mode for tensor in recording.inputs if hasattr(tensor, "fake_mode"))
    pairs = zip(recording.origins.values(), recording.inputs, strict=True)
    with mode:
        return [
            torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
            if origin.role == "batch"
            else tensor.detach().requires_grad_(tensor.requires_grad)
            for origin, tensor in pairs
        ]


def _origins(
    graph: fx.Graph, inputs: Sequence[Tensor], names: dict[int, Origin], model: nn.Module
) -> dict[fx.Node, Origin]:
    origins = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, inputs, strict=True):
        if id(tensor) not in names:
            refuse_plain_tensor(node, tensor, model)
        origins[node] = names[id(tensor)]
    return origins


def _refuse_data_dependent(graph: fx.Graph) -> None:
    """Raise where a number or a shape depends on what is in the batch."""
    for node in graph.nodes:
        value = value_of(node)
        if not depends_on_data(value):
            continue
        if not tensors_in(value):
            raise TraceError(
                f"{callee(node)} takes a number out of a tensor ({source_of(node)})",
                legal="numbers that depend on data stay tensors: no .item(), .tolist() or float()",
            )
        raise TraceError(
            f"the shape of {callee(node)} depends on data ({source_of(node)})",
            legal="shapes known from the batch's shape: to count, F.one_hot(i, E).sum(0); for a loop "
            "over experts, piper.mixture(experts, rows, chosen, weights, num_experts=E)",
        )


def _refuse_counted_parameters(
    count: fx.Node, origins: dict[fx.Node, Origin], facts: Facts
) -> None:
    """A count that depends on parameters is a metric: dividing by it would train something else."""
    stack = [arg for arg in count.args[1:] if isinstance(arg, fx.Node)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node in origins and origins[node].role == "param":
            raise TraceError(
                f"step's count depends on parameter {origins[node].name}",
                legal="a mean loss alone, or (sum, count) with a count of what the sum is over",
            )
        for arg in facts.inputs(node):
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)


def _drop_dead_code(graph: fx.Graph, facts: Facts, given: Sequence[fx.Node]) -> None:
    """Remove what neither the results nor what is `given` to state in the end depends on, nor a change
    that they see."""
    memory = {memory for node in given for memory in facts.memory[node]}
    changers = [node for node, changes in facts.changes.items() if changes & memory]
    stack = [next(iter(reversed(graph.nodes))), *given, *changers]
    live = set(stack)
    while stack:
        for node in facts.inputs(stack.pop()):
            if node not in live:
                live.add(node)
                stack.append(node)
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)


def _fake_leaf(leaf: Tensor, rows: int, dtype: str) -> Tensor:
    wanted = getattr(torch, dtype) if dtype and leaf.is_floating_point() else leaf.dtype
    return torch.empty((rows, *leaf.shape[1:]), dtype=wanted)


def _tensor_names(model: nn.Module, batch: Any) -> dict[int, Origin]:
    names = {id(leaf): Origin("batch", name) for name, leaf in batch_leaves(batch).items()}
    for role, tensors in (("buffer", model.named_buffers()), ("param", model.named_parameters())):
        names |= {id(tensor): Origin(role, plain_name(name)) for name, tensor in tensors}
    return names


def plain_name(name: str) -> str:
    """A parameter's name without characters that the graph's own names use."""
    return quote(name, safe="._-")


def first_difference(one: Capture, other: Capture) -> Source | None:
    """The user's line at which two captures of the same code part."""
    for mine, theirs in zip_longest(plain_code(one.graph), plain_code(other.graph)):
        if mine is None or theirs is None or _step_of(mine) != _step_of(theirs):
            found = [source_of(node) for node in (mine, theirs) if node is not None]
            return next((source for source in found if source), None)
    return None


def alike(one: Capture, other: Capture) -> bool:
    """Whether two captures have the same plain code in the same places."""
    pairs = zip_longest(plain_code(one.graph), plain_code(other.graph))
    return all(mine and theirs and _step_of(mine) == _step_of(theirs) for mine, theirs in pairs)


def _step_of(node: fx.Node) -> tuple[Any, ...]:
    return node.op, steps_of(node), node.meta.get("custom"), len(node.all_input_nodes)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Without torch's warnings and logs about fake tensors; what was said is kept."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        log.setLevel(level)
