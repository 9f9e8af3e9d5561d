"""The code of one piece: its nodes and how they read in, ChunkCode on one rank's parts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piper.bodies.chunk_code import ChunkCode, ChunkInput, dtype_name, spec_of
from piper.bodies.cutting.joint import fake_inputs, runner
from piper.bodies.tensor.analysis import Analysis
from piper.bodies.tensor.changes import PLACE, Change, Piece, Reading, Ref
from piper.bodies.tensor.forward_code import SEQUENCE
from piper.bodies.tensor.parts import local_shape
from piper.bodies.tensor.spread import assemble, own_part, padded, spread
from piper.errors import TraceError
from piper.ir.layouts import Layout, Split
from piper.ir.tensor_type import TensorType


class PieceCode:
    """Writes a piece; `place` and `call` serve the local code of rules."""

    def __init__(
        self, analysis: Analysis, module: fx.GraphModule, nodes: Sequence[fx.Node]
    ) -> None:
        self.analysis, self.module, self.size = analysis, module, analysis.size
        self.nodes = dict.fromkeys(nodes)
        self.graph = fx.Graph()
        self._held: dict[Ref, fx.Node] = {}
        self._local: dict[Any, fx.Node] = {}  # of nodes, changes and parts
        self._wanted: set[Ref] = set()  # whose gradients something here passes back
        self._source: fx.Node | None = None  # whose local code is being written

    def piece(self, outputs: list[Ref]) -> Piece:
        for node in self.nodes:
            self._value(node)
        results = []
        for ref in outputs:
            if isinstance(ref.of, Change):
                self._source = ref.of.source
                results.append(self._sent(ref.of))
            else:
                assert ref.of is not None
                results.append(self._value(ref.of))
        self.graph.output(tuple(results))
        return Piece(self._code(outputs), list(self._held), outputs)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        if target is torch.ops.aten.view.default:  # parts that are put together lie otherwise
            target = torch.ops.aten.reshape.default
        made = self.graph.call_function(target, args, kwargs)
        if self._source is not None and "stack_trace" in self._source.meta:
            made.meta["stack_trace"] = self._source.meta["stack_trace"]
        return made

    def place(self) -> fx.Node:
        """For the local code of a rule."""
        if self._source is not None:
            self.analysis.check_place(self._source)
        return self._holder(PLACE)

    def _holder(self, ref: Ref) -> fx.Node:
        if self._source is not None and self.analysis.flows(self._source):
            self._wanted.add(ref)
        if ref not in self._held:
            first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
            name = f"{ref.kind}_{len(self._held)}"
            if first is None:
                self._held[ref] = self.graph.placeholder(name)
            else:
                with self.graph.inserting_before(first):
                    self._held[ref] = self.graph.placeholder(name)
        return self._held[ref]

    def _value(self, node: fx.Node) -> fx.Node:
        """A node's own Value: made here, or by an earlier piece."""
        if node in self._local:
            return self._local[node]
        if not self._is_made_here(node):
            return self._holder(Ref("node", node))
        before, self._source = self._source, node
        self._local[node] = self._made(node)
        self._source = before
        return self._local[node]

    def _is_made_here(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return False
        everywhere = node in self.analysis.free or node in self.analysis.weights
        return everywhere or node in self.nodes

    def _made(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        if node not in self.analysis.answers:  # free code, and items of what is made here
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            return self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        read = [self._read(reading) for reading in self.analysis.readings[node]]
        code = self.analysis.answers[node].code
        if code is not None:
            made = code(self, read)
            if SEQUENCE in node.meta:
                made.meta[SEQUENCE] = node.meta[SEQUENCE]
            return made
        each = iter(read)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(each))
        return self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _read(self, reading: Reading) -> fx.Node:
        ref, part = reading
        value = self._changed(ref.of) if isinstance(ref.of, Change) else self._value(_node(ref))
        if part is None:
            return value
        if reading not in self._local:
            shape = _node(ref).meta["val"].shape
            self._local[reading] = own_part(
                self.graph, value, shape, part, self.size, self._holder(PLACE)
            )
        return self._local[reading]

    def _changed(self, change: Change) -> fx.Node:
        held = self._holder(Ref("change", change))
        if not change.stacked:
            return held
        assert isinstance(change.have, Split)
        if change not in self._local:
            whole = local_shape(change.source.meta["val"].shape, change.want, self.size)
            self._local[change] = assemble(self.graph, held, whole, change.have, self.size)
        return self._local[change]

    def _sent(self, change: Change) -> fx.Node:
        shape = local_shape(change.source.meta["val"].shape, change.have, self.size)
        if change.pads:
            own = self._value(change.source)
            return padded(self.graph, own, len(shape), self.size, self._holder(PLACE))
        assert isinstance(change.want, Split)
        return spread(self.graph, self._value(change.source), shape, change.want, self.size)

    def _code(self, outputs: list[Ref]) -> ChunkCode:
        constants = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                constants[str(node.target)] = getattr(self.module, str(node.target))
        if not all(isinstance(constant, Tensor) for constant in constants.values()):
            raise TraceError(
                "code that is cut over ranks calls an operator that takes functions",
                legal="flex_attention, scan and the like outside of code that is cut over ranks",
            )
        inputs = tuple(self._input(ref) for ref in self._held)
        code = ChunkCode(self.graph, constants, inputs, (), ())
        fakes, mode = fake_inputs(code, "cpu")
        with mode, torch.enable_grad():
            results = runner(code, device="cpu")(*fakes)
        flows = [self.analysis.flows(_node(ref)) for ref in outputs]
        for ref, result, flow in zip(outputs, results, flows, strict=True):
            assert result.requires_grad or not flow, f"no gradient passes {_node(ref)} in its piece"
        tangents = tuple(index for index, flow in enumerate(flows) if flow)
        return ChunkCode(self.graph, constants, inputs, tuple(map(spec_of, results)), tangents)

    def _input(self, ref: Ref) -> ChunkInput:
        if ref == PLACE:
            return ChunkInput(TensorType((1,), "int64"), False, False, False)
        node = _node(ref)
        value = node.meta["val"]
        shape = _held_shape(ref, self.analysis.layouts[node], value.shape, self.size)
        grad = ref in self._wanted and self.analysis.flows(node)
        param = node in self.analysis.facts and self.analysis.facts[node].param
        again = isinstance(ref.of, Change) and ref.of.gathers
        spec = TensorType(shape, dtype_name(value.dtype))
        return ChunkInput(spec, param, grad, grad, again=again)


def _node(ref: Ref) -> fx.Node:
    assert ref.of is not None
    return ref.of.source if isinstance(ref.of, Change) else ref.of


def _held_shape(ref: Ref, layout: Any, whole: Sequence[int], size: int) -> tuple[int, ...]:
    """What arrives: a rank's part, or a stack with an entry per rank."""
    if not isinstance(ref.of, Change):
        own: Layout = layout
        return local_shape(whole, own, size)
    changed = local_shape(whole, ref.of.want, size)
    return (size, *local_shape(changed, ref.of.have, size)) if ref.of.stacked else changed
