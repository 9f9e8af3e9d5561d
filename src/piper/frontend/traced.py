"""The traced program: a Capture in, chunks with their code and the logical graph out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, fx

from piper.bodies.captured_nodes import numbered
from piper.bodies.chunk_code import ChunkCode, ChunkInput, spec_of
from piper.errors import TraceError
from piper.frontend.capture.capture import Capture, source_of, value_of
from piper.frontend.capture.random_ops import copy_keyed, first_place, random_indexes
from piper.frontend.capture.state_parts import StatePart
from piper.frontend.capture.statistics import synced_norm
from piper.frontend.capture.step_results import refuse_constant_metrics
from piper.frontend.cut.chunks import cut
from piper.frontend.cut.finer_chunks import Refined, cut_pieces
from piper.frontend.cut.regions import assign_regions, free_code
from piper.frontend.cut.stage_choice import StageCut
from piper.frontend.cut.state_homes import state_homes
from piper.frontend.cut.state_packs import Pack, fold_of, pack, packs_of
from piper.frontend.refuse.mutation import refuse_mutation
from piper.ir.layouts import Layouts
from piper.ir.nodes import Tags
from piper.ir.tensor_type import TensorType
from piper.ir.values import Role
from piper.plan.keys import KEY, ranges_of


@dataclass(frozen=True)
class TracedValue:
    """A tensor that crosses a chunk's boundary.

    Along axes that share tensors it lies as `cut` says, and `spec` is what one rank has of it, but for
    parameters. With a `source` it is that Value in another layout.
    """

    role: Role
    spec: TensorType
    gradient: bool  # whether a gradient passes through it
    batched: bool  # whether it depends on the batch, or on random numbers
    of: str = ""  # what keys are for; the name of a metric
    cut: Layouts = ()
    source: str = ""


@dataclass(frozen=True)
class TracedChunk:
    """One chunk: its tags, its place among its region's parts, its Values and its code.

    `whole` numbers the chunk that it is a piece of, in the program without finer cuts. Along axes that
    share tensors `gradients` says how the gradients of its parameters lie; there it is a `piece_of` the
    chunk of this number before, of which the user's code keeps what `checkpoint` says. A layer of
    experts is a whole of which several chunks are pieces, too, where it runs again.
    """

    tags: Tags
    part: int
    parts: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    code: ChunkCode
    whole: int
    gradients: tuple[tuple[str, Layouts], ...] = ()
    piece_of: int = -1
    checkpoint: Literal["", "nothing", "expensive"] = ""


@dataclass(frozen=True)
class Traced:
    """All chunks of a step in a topological order, for one batch shape.

    `changed` are the buffers that they change, and `carried` those of them that they read, too, so that
    a microbatch depends on the one before; each with the user's line. `synced` is the user's line of a
    norm whose statistics are to be those of all data ranks. `gathered` are the operators that read whole
    what is cut, each with the reason and the user's line.
    """

    chunks: tuple[TracedChunk, ...]
    values: dict[str, TracedValue]
    loss: str
    count: str
    metrics: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    carried: Mapping[str, str] = field(default_factory=dict)
    synced: str = ""
    gathered: tuple[str, ...] = ()


def cut_program(
    capture: Capture,
    *,
    stages: str,
    cut_at: StageCut | None = None,
    pieces: Mapping[int, int] | None = None,
    counts: Iterable[tuple[int, int]] = (),
    calls: Collection[int] = (),
    layers: Collection[tuple[int, ...]] = (),
) -> Traced:
    """All chunks; those that `pieces` names in pieces of at most so many bytes of parameters, the first
    of each pair of `counts` cut where it has made the counts of the second, those of `calls` around
    checkpointed calls and around the layers that each group of `layers` runs through.

    Stages are those that the model's code is tagged with, or begin where `cut_at` says.
    """
    if cut_at is None:
        regions = assign_regions(capture, stages=stages)
    else:
        stage_of = {n: cut_at.stage_of(i) for n, i in numbered(capture.graph).items()}
        regions = assign_regions(capture, stages=cut_at.tag, stage_of=stage_of)
    free = free_code(capture)
    code = [node for node in regions if node not in free]
    chunk_of = cut(code, regions, capture.facts.inputs_with_changers)
    refined = cut_pieces(capture, chunk_of, pieces or {}, counts, calls, layers)
    refuse_mutation(list(regions), refined.chunk_of, capture)
    return _Cutter(capture, regions, free, refined.chunk_of).traced(refined)


class _Cutter:
    def __init__(
        self,
        capture: Capture,
        regions: dict[fx.Node, Tags],
        free: set[fx.Node],
        chunk_of: dict[fx.Node, int],
    ) -> None:
        self.capture = capture
        self.regions = regions
        self.free = free
        self.chunk_of = chunk_of
        self.metrics = {node: name for name, node in capture.metrics.items()}
        self.predictions = {node: name for name, node in capture.predictions.items()}
        refuse_constant_metrics(capture.metrics, free.__contains__)
        self.flowing = capture.facts.flowing
        self.random = random_indexes(capture)
        self.batched = _batched(capture, self.random)
        self.members: list[list[fx.Node]] = [[] for _ in range(max(chunk_of.values()) + 1)]
        for node, chunk in chunk_of.items():
            self.members[chunk].append(node)

    def traced(self, refined: Refined) -> Traced:
        tags = [self.regions[nodes[0]] for nodes in self.members]
        values: dict[str, TracedValue] = {}
        chunks = []
        homes = state_homes(self.capture, self.chunk_of)
        for index, nodes in enumerate(self.members):
            state = homes.get(index, [])
            inputs, outputs = self._inputs(nodes), self._outputs(index, nodes)
            inputs += [b for part in state for b in part.buffers if b not in inputs]
            for node in (*inputs, *outputs):
                values[self.name(node)] = self._value(node)
            keys = self._keys(nodes, values)
            packs = packs_of(index, state)
            for made in packs:
                values[made.name] = TracedValue("statistic", made.type, False, batched=True)
            same = [i for i, other in enumerate(tags) if other == tags[index]]
            chunks.append(
                TracedChunk(
                    tags=tags[index],
                    part=same.index(index),
                    parts=len(same),
                    inputs=(*map(self.name, inputs), *keys),
                    outputs=(*map(self.name, outputs), *(made.name for made in packs)),
                    code=self._code(index, nodes, inputs, outputs, state, packs),
                    whole=refined.whole[index],
                    piece_of=refined.layer[index],
                )
            )
        count = self.capture.count
        parts = self.capture.state
        return Traced(
            tuple(chunks),
            values,
            self.name(self.capture.loss),
            self.name(count) if count else "",
            tuple(self.capture.metrics),
            changed=frozenset(self.name(b) for part in parts for b in part.buffers),
            carried={
                self.name(b): str(source_of(part.given[0]))
                for part in parts
                for b in part.buffers
                if part.carried
            },
            synced=synced_norm(self.capture.graph),
        )

    def name(self, node: fx.Node) -> str:
        origin = self.capture.origins.get(node)
        return origin.name if origin else f"%{node.name}"

    def _keys(self, nodes: list[fx.Node], values: dict[str, TracedValue]) -> tuple[str, ...]:
        """The Value with a chunk's keys, if it draws random numbers."""
        drawn = [node for node in nodes if node in self.random]
        if not drawn:
            return ()
        name = KEY + ranges_of([self.random[node] for node in drawn])
        spec = TensorType((len(drawn),), "int64")
        values[name] = TracedValue("key", spec, gradient=False, batched=True, of=first_place(drawn))
        return (name,)

    def _value(self, node: fx.Node) -> TracedValue:
        result = value_of(node)
        if not isinstance(result, Tensor):
            raise TraceError(
                f"{node.name} passes between regions but is no tensor ({source_of(node)})",
                legal="tensors between regions",
            )
        origin = self.capture.origins.get(node)
        role: Role = origin.role if origin else "activation"  # type: ignore[assignment]
        if role == "param" and result.is_complex() and node in self.flowing:
            raise TraceError(
                f"parameter {self.name(node)} is complex, which is not supported yet",
                legal="two real parameters, and torch.complex in the model's code",
            )
        if node is self.capture.loss:
            role = "loss"
        elif node is self.capture.count:
            role = "count"
        elif node in self.metrics:
            role = "metric"
        elif node in self.predictions:
            role = "prediction"
        batched, of = node in self.batched, self.metrics.get(node, self.predictions.get(node, ""))
        return TracedValue(role, spec_of(result), node in self.flowing, batched, of)

    def _with_free_code(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """A chunk's nodes after the free code that they read, in trace order."""
        needed: set[fx.Node] = set()
        stack = list(nodes)
        while stack:
            for arg in self.capture.facts.inputs(stack.pop()):
                if arg in self.free and arg not in needed:
                    needed.add(arg)
                    stack.append(arg)
        own = needed | set(nodes)
        return [node for node in self.capture.graph.nodes if node in own]

    def _inputs(self, nodes: list[fx.Node]) -> list[fx.Node]:
        own = self._with_free_code(nodes)
        inside = set(own)
        read: dict[fx.Node, None] = {}
        for node in own:
            for arg in node.all_input_nodes:
                if arg not in inside:
                    read[arg] = None
        return list(read)

    def _outputs(self, index: int, nodes: list[fx.Node]) -> list[fx.Node]:
        results = (self.capture.loss, self.capture.count, *self.metrics, *self.predictions)
        return [
            node
            for node in nodes
            if node in results
            or any(self.chunk_of.get(user, index) != index for user in node.users)
        ]

    def _code(
        self,
        index: int,
        nodes: list[fx.Node],
        inputs: list[fx.Node],
        outputs: list[fx.Node],
        state: list[StatePart],
        packs: list[Pack],
    ) -> ChunkCode:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        position = {node: i for i, node in enumerate(n for n in nodes if n in self.random)}
        keys = [graph.placeholder("keys")] if position else []
        for node in self._with_free_code(nodes):
            if node in position:
                copies[node] = copy_keyed(
                    graph, node, copies, keys=keys[0], position=position[node]
                )
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        packed = [pack(graph, made, copies) for made in packs]
        graph.output((*(copies[node] for node in outputs), *packed))
        constants = {
            str(n.target): self.capture.constants[str(n.target)]
            for n in copies
            if n.op == "get_attr"
        }
        return ChunkCode(
            graph=graph,
            constants=constants,
            inputs=(
                *(self._input(index, node) for node in inputs),
                *(_keys_input(len(position)) for _ in keys),
            ),
            outputs=(
                *(spec_of(value_of(node)) for node in outputs),
                *(made.type for made in packs),
            ),
            tangents=tuple(
                i
                for i, node in enumerate(outputs)
                if node in self.flowing
                and (node is self.capture.loss or self._flows_out(index, node))
            ),
            fold=fold_of(
                state,
                packs,
                inputs=inputs,
                first=len(outputs),
                constants=self.capture.constants,
            ),
        )

    def _input(self, index: int, node: fx.Node) -> ChunkInput:
        origin = self.capture.origins.get(node)
        grad = node in self.flowing and any(
            self.chunk_of.get(user) == index and user in self.flowing for user in node.users
        )
        spec = spec_of(value_of(node))
        param = origin is not None and origin.role in ("param", "buffer")
        carried = any(part.carried and node in part.buffers for part in self.capture.state)
        return ChunkInput(
            spec, param=param and not carried, requires_grad=grad, grad=grad, carried=carried
        )

    def _flows_out(self, index: int, node: fx.Node) -> bool:
        return any(
            self.chunk_of.get(user, index) != index and user in self.flowing for user in node.users
        )


def _batched(capture: Capture, random: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Nodes whose results differ between microbatches."""
    batched = set(random) | {n for n, o in capture.origins.items() if o.role == "batch"}
    batched |= {node for part in capture.state if part.carried for node in part.buffers}
    for node in capture.graph.nodes:
        if any(arg in batched for arg in capture.facts.inputs_with_changers(node)):
            batched.add(node)
    return batched


def _keys_input(num: int) -> ChunkInput:
    spec = TensorType((num,), "int64")
    return ChunkInput(spec, param=False, requires_grad=False, grad=False)
