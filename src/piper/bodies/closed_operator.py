"""ClosedOperator: an operator with graphs among its arguments in, one function of tensors out.

`autograd.Function` is such an operator: its forward and its backward are graphs. Closed over them, a
call is an ordinary node. It is cut, hashed and differentiated like any other, and AOTAutograd leaves
only the operators inside of the graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from piper.bodies.chunk_code import graph_words

_known: WeakValueDictionary[Any, ClosedOperator] = WeakValueDictionary()


class ClosedOperator:
    """`operator` with all `arguments` (args and kwargs) but the nodes among them, which a call gives."""

    def __init__(self, operator: Callable[..., Any], arguments: Any, digest: str) -> None:
        self.operator = operator
        self.__name__ = str(getattr(operator, "__name__", operator))
        self.__qualname__ = f"{self.__name__}_{digest}"
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._leaves = leaves
        self._given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        self._graphs = {i: leaf for i, leaf in enumerate(leaves) if _is_graph(leaf)}
        self._on_device: dict[torch.device, dict[int, fx.GraphModule]] = {}

    def __call__(self, *given: Any) -> Any:
        # Devices that the graphs name are those of the trace; the default one is where this call runs.
        device = torch.get_default_device()
        if device not in self._on_device:
            self._on_device[device] = {i: _moved(g, device) for i, g in self._graphs.items()}
        leaves = list(self._leaves)
        for index, value in zip(self._given, given, strict=True):
            leaves[index] = value
        for index, graph in self._on_device[device].items():
            leaves[index] = graph
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self.operator(*args, **kwargs)

    @property
    def steps(self) -> tuple[Any, ...]:
        """The calls inside, without the numbers in their arguments."""
        nodes = [node for graph in self._graphs.values() for node in graph.graph.nodes]
        return self.__name__, *((n.op, steps_of(n), len(n.all_input_nodes)) for n in nodes)


def steps_of(node: fx.Node) -> Any:
    """A node's target, or what is called inside of it: equal for equal code on other shapes."""
    return node.target.steps if isinstance(node.target, ClosedOperator) else node.target


def targets_in(node: fx.Node) -> list[Any]:
    """A node's target, with those of the calls inside of it."""
    return pytree.tree_leaves(steps_of(node))


def close(graph: fx.Graph, node: fx.Node, graphs: Mapping[fx.Node, fx.GraphModule]) -> None:
    """Make `node` a call of the operator closed over the `graphs` that are among its arguments."""
    known: Mapping[fx.Node, Any] = graphs
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
    closed = _closed(node.target, arguments)
    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]
    with graph.inserting_before(node):
        call = graph.call_function(closed, tuple(given))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)


def _closed(operator: Any, arguments: Any) -> ClosedOperator:
    """One object for equal calls, so that chunks that make them have equal bodies."""
    leaves, structure = pytree.tree_flatten(arguments)
    words = [str(operator), str(structure)]
    targets: list[int] = [id(operator)]
    for leaf in leaves:
        if _is_graph(leaf):
            words += graph_words(leaf.graph, dict(leaf.named_buffers()))
            targets += [id(n.target) for n in leaf.graph.nodes if n.op == "call_function"]
        else:
            words.append("a Value" if isinstance(leaf, fx.Node) else repr(leaf))
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    key = digest, tuple(targets)
    found = _known.get(key)
    if found is None:
        found = _known[key] = ClosedOperator(operator, arguments, digest)
    return found


def _is_graph(leaf: Any) -> bool:
    return isinstance(leaf, fx.GraphModule)


def _moved(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
    root = torch.nn.Module()
    for name, constant in module.named_buffers():
        root.register_buffer(name, constant.to(device))
    return fx.GraphModule(root, graph)


def bare(graph: fx.Graph, constants: Mapping[str, Tensor]) -> fx.GraphModule:
    """A graph of the trace without the fake tensors that it was traced on."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        node.meta = {}
    root = torch.nn.Module()
    for name, constant in constants.items():
        root.register_buffer(name, constant)
    return fx.GraphModule(root, copy)
