"""The cuts of a chunk: a Joint in; forward, backward, its two halves and what they exchange out.

What depends on no tangent runs forward and what the backward reads of it is saved, except that the
backward makes again whatever costs nothing: views of what it has, constants, and anything derived from
parameters alone (so that no saved Value keeps a parameter's memory alive). What was cast to a wider
dtype is saved as it was before, and what was only put together of gathered inputs is put together
again. With recompute it also makes again what costs something. A backward's
input part (BI) has all that gradients of activations need; its weight part (BW) is given what BI made of
that, and computes only the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piper.bodies.chunk_code import ChunkCode, ChunkInput
from piper.bodies.cutting.body_memory import UNSAFE_VIEWS
from piper.bodies.cutting.joint import Joint
from piper.bodies.cutting.made_again import MadeAgain, made_again
from piper.plan.body_spec import Ref

Recompute = Literal["", "nothing", "expensive"]  # what is kept


@dataclass
class Half:
    """One side of a cut: its graph, and what each placeholder and result stands for."""

    graph: fx.Graph
    inputs: list[Ref] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)  # nodes of the joint graph


@dataclass
class Parts:
    """All bodies of a chunk. A backward, or a half of it, that would do nothing is None."""

    forward: Half
    backward: Half | None = None
    input_half: Half | None = None
    weight_half: Half | None = None


def partition(joint: Joint, code: ChunkCode, recompute: Recompute = "") -> Parts:
    cut = _Cut(joint, code, recompute)
    if not code.tangents:
        return Parts(cut.forward_half())
    backward = cut.backward_half(cut.wanted())
    input_half, weight_half = cut.backward_halves()
    return Parts(cut.forward_half(), backward, input_half, weight_half)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result, or a part of it, shares memory with its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if node.target in UNSAFE_VIEWS:
        return True
    alias = node.target._schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def is_widened(node: fx.Node) -> bool:
    """Whether a node is all the numbers of another one's memory, in a dtype of more bytes."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    made, given = node.meta["val"], node.all_input_nodes[0].meta["val"]
    floating = made.dtype.is_floating_point and given.dtype.is_floating_point
    if not floating or made.dtype.itemsize <= given.dtype.itemsize:
        return False
    held = root_of(node.all_input_nodes[0]).meta.get("val")
    return isinstance(held, torch.Tensor) and str(held.numel()) == str(made.numel())


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shares."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


_MOVES = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)  # that are no views


class _Cut:
    def __init__(self, joint: Joint, code: ChunkCode, recompute: Recompute) -> None:
        self.joint = joint
        self.code = code
        self.recompute = recompute
        nodes = list(joint.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        num_inputs = len(code.inputs)
        self.inputs = {node: i for i, node in enumerate(placeholders[:num_inputs])}
        self.tangents = dict(zip(placeholders[num_inputs:], code.tangents, strict=True))
        results = list(nodes[-1].args[0])
        self.results: list[fx.Node] = results[: joint.num_outputs]
        self.grads: list[fx.Node | None] = results[joint.num_outputs :]
        self.outputs = {node: i for i, node in reversed(list(enumerate(self.results)))}
        self.saved: dict[fx.Node, int] = {}
        self.kept: dict[fx.Node, int] = {}  # what BI gives to BW
        self._keep: set[fx.Node] = set()  # what BI has made, while BW is cut
        # A backward comes when others have changed what is carried: it gets the copies of it.
        self._copies = {
            user for node, i in self.inputs.items() if code.inputs[i].carried for user in node.users
        }
        clone = torch.ops.aten.clone.default
        assert all(copy.target is clone for copy in self._copies), "what is carried is copied first"
        self._twin: dict[fx.Node, fx.Node] = {}
        if recompute != "nothing":
            self._twin = {root_of(n): n for n in self.outputs if self._same_memory(n, root_of(n))}
        self._classify(nodes)
        self._put_together = self._only_moved(nodes)
        self.checkpoints = MadeAgain()
        if code.tangents:
            self.checkpoints = made_again(joint.graph, self.results, self.on_tangent, root_of)
            again = self.checkpoints.again
            self._twin = {n: twin for n, twin in self._twin.items() if n not in again}

    @staticmethod
    def _same_memory(output: fx.Node, root: fx.Node) -> bool:
        """Whether `root` is `output` in another shape, so that the backward can view it back."""
        if root is output or root.op != "call_function":
            return False
        mine, other = root.meta["val"], output.meta["val"]
        return bool(mine.is_contiguous() and mine.dtype == other.dtype) and (
            str(mine.numel()) == str(other.numel())
        )

    def _classify(self, nodes: list[fx.Node]) -> None:
        """What depends on a tangent, and what depends on other inputs than parameters."""
        self.on_tangent: set[fx.Node] = set(self.tangents)
        self.on_data: set[fx.Node] = {
            n for n, i in self.inputs.items() if not self.code.inputs[i].param
        }
        for node in nodes:
            if node.op == "call_function":
                if any(arg in self.on_tangent for arg in node.all_input_nodes):
                    self.on_tangent.add(node)
                if any(arg in self.on_data for arg in node.all_input_nodes):
                    self.on_data.add(node)

    def _only_moved(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What has the numbers of inputs that can be had again, in another place."""
        found = {node for node, i in self.inputs.items() if self.code.inputs[i].again}
        for node in nodes if found else ():
            moves = node.op == "call_function" and (is_view(node) or node.target in _MOVES)
            if moves and node.all_input_nodes and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def wanted(self) -> list[int]:
        """The inputs whose gradients the surroundings ask for."""
        return [i for i, given in enumerate(self.code.inputs) if given.grad]

    def _closure(self, wanted: Iterable[fx.Node | None]) -> set[fx.Node]:
        """All nodes that lead to the wanted ones; fills `saved` on the way."""
        needed: set[fx.Node] = set()
        stack = [node for node in wanted if node is not None]
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if not self._is_source(node):
                stack += node.all_input_nodes
        return needed

    def backward_halves(self) -> tuple[Half | None, Half | None]:
        """BI and BW. A gradient of a parameter that a fused operator of BI makes is final in BI."""
        wanted = self.wanted()
        activations = [i for i in wanted if not self.code.inputs[i].param]
        if not activations:
            return None, self.backward_half(wanted)
        mine = self._closure(self.grads[i] for i in activations)
        again = {n for n in mine if is_view(n) or is_widened(n)}
        made = {n for n in mine if not self._is_source(n) and n not in again}
        # All results of an operator, also those that only BW reads; BW is given those that the
        # forward hands out by the forward: BI would hand on memory that is freed after it.
        parts = (u for n in made for u in n.users if u.target is operator.getitem)
        made |= {u for u in parts if self._given(u) is None}
        final = [i for i in wanted if i not in activations and self._made_by(self.grads[i], made)]
        rest = [i for i in wanted if i not in activations and i not in final]
        weight_half = None
        if rest:
            self._keep = made
            weight_half = self.backward_half(rest)
            self._keep = set()
        input_half = self.backward_half(sorted((*activations, *final)), keeping=list(self.kept))
        return input_half, weight_half

    @staticmethod
    def _made_by(grad: fx.Node | None, made: set[fx.Node]) -> bool:
        while grad is not None and (is_view(grad) or grad.target is operator.getitem):
            grad = grad.all_input_nodes[0]
        return grad in made

    def _is_source(self, node: fx.Node) -> bool:
        """Whether the backward is given this node, instead of computing it."""
        if node in self.inputs or node in self.tangents or node in self.saved:
            return True
        if node in self._keep and isinstance(node.meta.get("val"), torch.Tensor):
            self.kept.setdefault(node, len(self.kept))
            return True
        if node in self._copies:
            self.saved[node] = len(self.saved)
            return True
        if node in self.on_tangent or self._is_size(node) or self._is_made_again(node):
            return False
        if node in self.outputs:
            return True
        if is_view(node) or node.op == "get_attr" or node not in self.on_data:
            return False
        if is_widened(node) or node in self._put_together:
            return False
        if node in self._twin:
            return True
        cheap = not _is_expensive(node) and node not in self.checkpoints.leaving
        if self.recompute == "expensive" and cheap:
            return False
        self.saved[node] = len(self.saved)
        return True

    def _is_made_again(self, node: fx.Node) -> bool:
        return self.recompute == "nothing" or node in self.checkpoints.again

    @staticmethod
    def _is_size(node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt | int)

    def forward_half(self) -> Half:
        needed: set[fx.Node] = set()
        stack = [*self.results, *self.saved]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        half = Half(fx.Graph())
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.joint.graph.nodes:
            if node in needed:
                if node in self.inputs:
                    half.inputs.append(Ref("input", self.inputs[node]))
                copies[node] = half.graph.node_copy(node, copies.__getitem__)
        half.results = [*self.results, *self.saved]
        half.outputs = [Ref("output", i) for i in range(len(self.results))]
        half.outputs += [Ref("saved", i) for i in range(len(self.saved))]
        roots = {root_of(node) for node in self.saved}
        results = []
        for node in half.results:
            made = copies[node]
            if node not in self.saved and root_of(node) in roots and node is not root_of(node):
                made = _fresh(half.graph, made)
            results.append(made)
        half.graph.output(tuple(results))
        return half

    def backward_half(self, wanted: list[int], keeping: Sequence[fx.Node] = ()) -> Half:
        """The code that makes the gradients of the inputs `wanted`, and hands out `keeping`."""
        needed = self._closure([*(self.grads[i] for i in wanted), *keeping])
        half = Half(fx.Graph())
        copies: dict[fx.Node, fx.Node] = {}
        # Tangents come first so that sizes can be read off them.
        for node, index in self.tangents.items():
            if node in needed or not self._keep or None in (self.grads[i] for i in wanted):
                copies[node] = _placeholder(half.graph, node)
                half.inputs.append(Ref("tangent", index))
        nodes: list[fx.Node] = list(self.joint.graph.nodes)
        for node in nodes:
            ref = self._given(node) if node in needed and node not in copies else None
            if ref is not None and ref not in half.inputs:
                source = self._twin.get(node, node)
                copies[source] = _placeholder(half.graph, source)
                half.inputs.append(ref)
        for node in nodes:
            if node in needed and node in self._twin and node not in copies:
                shape = [n if isinstance(n, int) else -1 for n in node.meta["val"].shape]
                twin = copies[self._twin[node]]
                copies[node] = half.graph.call_function(torch.ops.aten.view.default, (twin, shape))
                copies[node].meta = node.meta
        results = {*(self.grads[i] for i in wanted), *keeping}
        for node in nodes:
            if node in needed and (node in self.on_tangent or node in results):
                self._emit(node, half.graph, copies)
        self._emit_grads(half, copies, wanted, keeping)
        return half

    def _emit(self, wanted: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        """Copy a node. What it needs and the backward makes again comes right before it, so that one
        layer's is dropped before the next one's is made."""
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in copies:
                stack.pop()
            elif self._is_size(node) and (size := self._size(node, graph, copies)):
                copies[node] = size
            elif missing := [arg for arg in node.all_input_nodes if arg not in copies]:
                stack += reversed(missing)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)

    def _given(self, node: fx.Node) -> Ref | None:
        if node in self.inputs:
            return Ref("input", self.inputs[node])
        if node in self.saved:
            return Ref("saved", self.saved[node])
        if node in self._keep and node in self.kept:
            return Ref("kept", self.kept[node])
        if self._is_made_again(node):
            return None
        node = self._twin.get(node, node)
        if node in self.outputs and node not in self.on_tangent and not self._is_size(node):
            return Ref("output", self.outputs[node])
        return None

    def _size(
        self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]
    ) -> fx.Node | None:
        """The same size read off a tangent, so that no input is kept alive for its shape."""
        wanted = node.meta["val"]
        for tangent in self.tangents:
            for dim, size in enumerate(tangent.meta["val"].shape):
                known = isinstance(size, torch.SymInt) and tangent in copies
                if known and str(size) == str(wanted):
                    return graph.call_function(torch.ops.aten.sym_size.int, (copies[tangent], dim))
        return None

    def _zeros(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node], given: ChunkInput) -> fx.Node:
        first = next(iter(self.tangents))
        shape: list[int | fx.Node] = [*given.spec.shape]
        if given.spec.bound is not None:
            shape[0] = graph.call_function(torch.ops.aten.sym_size.int, (copies[first], 0))
        dtype = {"dtype": getattr(torch, given.spec.dtype)}
        return graph.call_function(torch.ops.aten.new_zeros.default, (copies[first], shape), dtype)

    def _emit_grads(
        self,
        half: Half,
        copies: dict[fx.Node, fx.Node],
        wanted: list[int],
        keeping: Sequence[fx.Node],
    ) -> None:
        """Gradients leave like outputs: contiguous, and alone in their memory."""
        results = []
        seen: set[fx.Node] = set(keeping)
        for index in wanted:
            grad, given = self.grads[index], self.code.inputs[index]
            if grad is None:  # the code reads the input, but no gradient passes
                made = self._zeros(half.graph, copies, given)
            else:
                made = copies[grad]
                root = root_of(grad)
                shared = root in seen or copies.get(root, made).op == "placeholder"
                if shared or root in self._twin or not grad.meta["val"].is_contiguous():
                    made = _fresh(half.graph, made)
                seen.add(root)
            results.append(made)
            half.outputs.append(Ref("grad", index))
        for node in keeping:
            results.append(copies[node])
            half.results.append(node)
            half.outputs.append(Ref("kept", self.kept[node]))
        half.graph.output(tuple(results))


def _is_expensive(node: fx.Node) -> bool:
    """Matrix products and attention, and the parts of their results."""
    if node.target is operator.getitem:
        return _is_expensive(node.all_input_nodes[0])
    packet = getattr(node.target, "overloadpacket", None)
    ours = (torch.ops.piper.grouped_mm, torch.ops.piper.grouped_mm_weight)
    return packet in flop_registry or packet in ours or "attention" in str(packet)


def _fresh(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(
        torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
    )


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = node.meta
    return made
