"""The cut between forward and backward: a Joint in, two graphs and what they exchange out.

What depends on no tangent runs forward and what the backward reads of it is saved, except that the
backward makes again whatever costs nothing: views of what it has, constants, and anything derived from
parameters alone (so that no saved Value keeps a parameter's memory alive).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from piper.bodies.code import ChunkCode, ChunkInput
from piper.bodies.joint import Joint
from piper.plan.body_spec import Ref


@dataclass
class Half:
    """One side of the cut: its graph, and what each placeholder and result stands for."""

    graph: fx.Graph
    inputs: list[Ref] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)  # nodes of the joint graph


def partition(joint: Joint, code: ChunkCode) -> tuple[Half, Half | None]:
    cut = _Cut(joint, code)
    needed = cut.backward_nodes() if code.tangents else set()
    return cut.forward_half(), (cut.backward_half(needed) if code.tangents else None)


# These share memory with their argument although their schemas do not say so.
_UNSAFE_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result, or a part of it, shares memory with its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if node.target in _UNSAFE_VIEWS:
        return True
    alias = node.target._schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one shares."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


class _Cut:
    def __init__(self, joint: Joint, code: ChunkCode) -> None:
        self.joint = joint
        self.code = code
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
        self._twin = {root_of(n): n for n in self.outputs if self._same_memory(n, root_of(n))}
        self._classify(nodes)

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

    def backward_nodes(self) -> set[fx.Node]:
        """All nodes of the backward body; fills `saved` on the way."""
        wanted = [
            grad
            for grad, given in zip(self.grads, self.code.inputs, strict=True)
            if given.grad and grad is not None
        ]
        needed: set[fx.Node] = set()
        stack = wanted
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if self._is_source(node):
                continue
            stack += node.all_input_nodes
        return needed

    def _is_source(self, node: fx.Node) -> bool:
        """Whether the backward is given this node, instead of computing it."""
        if node in self.inputs or node in self.tangents or node in self.saved:
            return True
        if node in self.on_tangent or self._is_size(node):
            return False
        if node in self.outputs:
            return True
        if is_view(node) or node.op == "get_attr" or node not in self.on_data:
            return False
        if node not in self._twin:
            self.saved[node] = len(self.saved)
        return True

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

    def backward_half(self, needed: set[fx.Node]) -> Half:
        half = Half(fx.Graph())
        copies: dict[fx.Node, fx.Node] = {}
        # Tangents come first so that sizes can be read off them.
        for node, index in self.tangents.items():
            copies[node] = _placeholder(half.graph, node)
            half.inputs.append(Ref("tangent", index))
        for node in self.joint.graph.nodes:
            ref = self._given(node) if node in needed and node not in copies else None
            if ref is not None and ref not in half.inputs:
                given = self._twin.get(node, node)
                copies[given] = _placeholder(half.graph, given)
                half.inputs.append(ref)
        for node in needed & self._twin.keys():
            if node not in copies:
                shape = [n if isinstance(n, int) else -1 for n in node.meta["val"].shape]
                twin = copies[self._twin[node]]
                copies[node] = half.graph.call_function(torch.ops.aten.view.default, (twin, shape))
                copies[node].meta = node.meta
        for node in self.joint.graph.nodes:
            if node in needed and node not in copies:
                if self._is_size(node) and (size := self._size(node, half.graph, copies)):
                    copies[node] = size
                else:
                    copies[node] = half.graph.node_copy(node, copies.__getitem__)
        self._emit_grads(half, copies)
        return half

    def _given(self, node: fx.Node) -> Ref | None:
        if node in self.inputs:
            return Ref("input", self.inputs[node])
        if node in self.saved:
            return Ref("saved", self.saved[node])
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
                if isinstance(size, torch.SymInt) and str(size) == str(wanted):
                    return graph.call_function(torch.ops.aten.sym_size.int, (copies[tangent], dim))
        return None

    def _zeros(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node], given: ChunkInput) -> fx.Node:
        first = next(iter(self.tangents))
        shape: list[int | fx.Node] = [*given.spec.shape]
        if given.spec.dynamic:
            shape[0] = graph.call_function(torch.ops.aten.sym_size.int, (copies[first], 0))
        dtype = {"dtype": getattr(torch, given.spec.dtype)}
        return graph.call_function(torch.ops.aten.new_zeros.default, (copies[first], shape), dtype)

    def _emit_grads(self, half: Half, copies: dict[fx.Node, fx.Node]) -> None:
        """Gradients leave like outputs: contiguous, and alone in their memory."""
        results = []
        seen: set[fx.Node] = set()
        for index, (grad, given) in enumerate(zip(self.grads, self.code.inputs, strict=True)):
            if not given.grad:
                continue
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
        half.graph.output(tuple(results))


def _fresh(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(
        torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
    )


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = node.meta
    return made
